"""What the machine code of a kernel says of its accesses to memory; read with cuobjdump."""

import re
import subprocess
import tempfile
from pathlib import Path

# A load's bytes by the suffix of its opcode; 4 where it has none.
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def dump(cubin: bytes, what: str) -> str:
    """What cuobjdump, which comes with Triton, prints of a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), what, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def access_bytes(opcode: str) -> int:
    """Bytes that a load or store moves for a thread."""
    return next((_WIDTHS[part] for part in opcode.split(".") if part in _WIDTHS), 4)


def widest(sass: str, access: str) -> int:
    """Bytes of the widest LDG or STG; 0 where there is none."""
    return max(map(access_bytes, re.findall(rf"\b({access}\.\S+)", sass)), default=0)


def blocks(sass: str) -> list[list[str]]:
    """Instructions between places that are jumped to or from, in the order of the program."""
    targets = set(re.findall(r"\b(?:BRA|BSSY)\S* [^;]*?0x([0-9a-f]+)", sass))
    result: list[list[str]] = [[]]
    for address, instruction in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass):
        if address.lstrip("0") in targets:
            result.append([])
        result[-1].append(instruction)
        if re.search(r"\bBRA\b", instruction):
            result.append([])
    return result


def loads_in_flight(block: list[str], width: int) -> int:
    """The most loads of `width` bytes that a thread issues before it needs the first of them."""
    most = 0
    pending: list[set[int]] = []
    for instruction in block:
        used = {int(number) for number in re.findall(r"\bR(\d+)", instruction)}
        # Loads are waited for in the order in which they were issued.
        needed = [place for place, registers in enumerate(pending) if registers & used]
        if needed:
            pending = pending[needed[-1] + 1 :]
        load = re.search(r"\b(LDG\.\S+) R(\d+)", instruction)
        if load and access_bytes(load[1]) == width:
            first = int(load[2])
            pending.append(set(range(first, first + width // 4)))
            most = max(most, len(pending))
    return most


def loads_by_loop(sass: str, width: int) -> dict[tuple[str, bool], int]:
    """Loads in flight by loop over gradients: ("read" or "write", whether it is masked)."""
    result: dict[tuple[str, bool], int] = {}
    for block in blocks(sass):
        loads = [
            instruction
            for instruction in block
            if any(access_bytes(op) == width for op in re.findall(r"\bLDG\.\S+", instruction))
        ]
        if loads:
            loop = "write" if any("STG." in instruction for instruction in block) else "read"
            masked = all(load.startswith("@") for load in loads)
            most = max(loads_in_flight(block, width), result.get((loop, masked), 0))
            result[loop, masked] = most
    return result
