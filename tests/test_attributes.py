"""Names of other libraries are answered by their match here."""

from __future__ import annotations

import re
from operator import attrgetter

import pytest

import tritonclip
from tritonclip import functional, messages

NAMES = {
    "clip": "clip_",
    "clip_grad_norm": "clip_grad_norm_",
    "ClipGradByGlobalNorm": "ClipByGlobalNorm",
    "ClipGradByNorm": "ClipByNorm",
    "ClipGradByValue": "ClipByValue",
    "AutoClip": "ClipByQuantile",
    "ZClip": "ClipByZScore",
    "AdaGC": "ClipByOwnHistory",
    "AGC": "ClipByUnitNorm",
    "adaptive_clip_grad": "ClipByUnitNorm",
    "spectral_hardcap": "functional.clip_by_spectral_norm",
    "clip_by_global_norm": "functional.clip_by_global_norm",
    "Clipping": "integrations.lightning.Clipping",
}


@pytest.mark.parametrize(("name", "match"), NAMES.items())
def test_name_from_elsewhere_gets_its_match(name, match):
    with pytest.raises(AttributeError, match=rf"{name}'; here it is tritonclip\.{match}"):
        getattr(tritonclip, name)
    assert not hasattr(tritonclip, name)


@pytest.mark.parametrize(("name", "match"), NAMES.items())
def test_import_of_a_name_from_elsewhere_gets_its_match(name, match):
    with pytest.raises(ImportError, match=rf"{name}'; here it is tritonclip\.{match}"):
        exec(f"from tritonclip import {name}")


@pytest.mark.parametrize("name", ["clip", "adaptive_clip_grad"])
def test_functional_knows_names_from_elsewhere(name):
    with pytest.raises(AttributeError, match=rf"\.functional' .*'{name}'; here it is"):
        getattr(functional, name)


@pytest.mark.parametrize("module", [tritonclip, functional], ids=lambda module: module.__name__)
def test_other_names_get_pythons_errors(module):
    with pytest.raises(AttributeError, match=f"^module '{module.__name__}' has no attribute 'it'$"):
        _ = module.it
    with pytest.raises(ImportError, match="cannot import name 'it'"):
        exec(f"from {module.__name__} import it")


def test_every_match_is_there():
    for name, text in messages._MATCHES.items():
        path = re.split(r"[ ,(]", text)[0]
        assert name not in tritonclip.__all__
        # Their packages are optional.
        assert path.startswith("integrations.") or attrgetter(path)(tritonclip)
