"""Our names for functions of other libraries, shown when a missing attribute is looked up."""

from types import ModuleType

# Names from torch, Paddle, TensorFlow, optax, timm and papers.
NAMES = {
    "AdaGC": "ClipByOwnHistory",
    "adaptive_clip_grad": "ClipByUnitNorm",
    "adaptive_grad_clip": "ClipByUnitNorm",
    "AGC": "ClipByUnitNorm",
    "apply_if_finite": 'ClippedOptimizer(..., nonfinite="skip")',
    "AutoClip": "ClipByQuantile",
    "clip": "clip_ (in place) or functional.clip_by_value (out of place)",
    "clip_by_average_norm": "functional.clip_by_average_norm",
    "clip_by_block_rms": "ClipByRMS (in place) or functional.clip_by_rms (out of place)",
    "clip_by_global_norm": "functional.clip_by_global_norm (out of place) or clip_ (in place)",
    "clip_by_norm": "functional.clip_by_norm (out of place) or clip_ with ClipByNorm (in place)",
    "clip_by_rms": "functional.clip_by_rms (out of place) or clip_ with ClipByRMS (in place)",
    "clip_by_value": "functional.clip_by_value (out of place) or clip_ with ClipByValue (in place)",
    "clip_grad": "clip_",
    "clip_grad_norm": "clip_grad_norm_",
    "clip_grad_value": "clip_grad_value_",
    "clip_gradients": "clip_",
    "clip_grads_with_norm": "clip_grads_with_norm_",
    "ClipGradByGlobalNorm": "ClipByGlobalNorm",
    "ClipGradByNorm": "ClipByNorm",
    "ClipGradByValue": "ClipByValue",
    "ClipGradForMOEByGlobalNorm": "ClipByGlobalNorm",
    "Clipping": "integrations.lightning.Clipping",
    "ClippingTrainer": "integrations.transformers.ClippingTrainer",
    "differentially_private_aggregate": "functional.clip_per_example, without its noise",
    "dispatch_clip_grad": "clip_",
    "ErrorClipByValue": "clip_backward",
    "global_norm": "get_total_norm, or functional.global_norm (differentiable)",
    "LossScaleOptimizer": "GradScaler",
    "per_example_global_norm_clip": "functional.clip_per_example",
    "per_example_layer_norm_clip": "functional.clip_per_example, with per_layer=True",
    "ZClip": "ClipByZScore",
}


def missing(module: ModuleType, name: str) -> AttributeError:
    """Makes the error of a module's `__getattr__`, with our name for another library's name."""
    text = f"module {module.__name__!r} has no attribute {name!r}"
    if name in NAMES:
        text += f"; here it is tritonclip.{NAMES[name]}"
    return AttributeError(text, name=name, obj=module)
