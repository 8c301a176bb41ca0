"""Every way to clip in place gives what one plain reference does, byte by byte, on random lists.

Lists, layouts, rules and options are drawn; helpers.clips has the reference.
"""

import random

import pytest
from hypothesis import given

from helpers.clips import ARENAS, CHOICES, clip_a_list, random_arena

# Kernels read runs of memory; gradients with gaps go to the torch backend, which is said once.
pytestmark = pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")


@pytest.mark.parametrize("kind", dict.fromkeys(ARENAS))
@given(choice=CHOICES)
def test_calls_on_a_random_list_are_right(backend, kind, choice: random.Random):
    clip_a_list(choice, random_arena(choice, backend.device, [kind]))
