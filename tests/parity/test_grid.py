"""One answer on every mesh: a few cases by default, all of them with `pytest -m grid`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.grid import SIXTEEN, Case, check

ACCUMULATION = (("gradient_accumulation_steps", 2),)


def pipeline(**fields):
    return tuple(fields.items())


SMOKE = [
    Case("tied", "pipeline=2,fsdp=2,tensor=2,data=1", 8, pipeline(microbatches=4)),
    Case("experts", "pipeline=2,data=1", 2, pipeline(virtual_stages=2, microbatches=4, residuals="save")),
]
"""Other axes run by default in test_meshes, test_context and test_experts."""

STAGED = [
    *(
        Case(variant, mesh, devices, section)
        for variant in ("dense", "odd", "experts")
        for mesh, devices, section in (
            ("pipeline=2,data=1", 2, pipeline(schedule="gpipe", microbatches=4)),
            ("pipeline=4,data=1", 4, pipeline(schedule="1f1b", microbatches=8)),
            ("pipeline=4,data=2", 8, pipeline(schedule="1f1b", microbatches=4, residuals="save")),
            ("pipeline=2,fsdp=2,data=2", 8, pipeline(microbatches=4)),
            ("pipeline=2,fsdp=2,tensor=2,data=1", 8, pipeline(microbatches=8, residuals="save")),
            ("pipeline=2,tensor=2,data=2", 8, pipeline(virtual_stages=2, microbatches=4)),
            ("pipeline=2,fsdp=4,data=1", 8, pipeline(virtual_stages=2, microbatches=2, residuals="save")),
        )
    ),
    Case("experts", "pipeline=2,data=1", 2, pipeline(microbatches=4)),
    Case("odd", "pipeline=2,data=1", 2, pipeline(virtual_stages=2, microbatches=4, residuals="save")),
    Case("tied", "pipeline=2,data=1", 2, pipeline(schedule="gpipe", virtual_stages=2, microbatches=4)),
    Case("tied", "pipeline=2,fsdp=2,data=1", 4, pipeline(microbatches=4), ACCUMULATION),
    Case("tied", "pipeline=4,tensor=2,data=1", 8, pipeline(microbatches=16)),
    Case("tied", "pipeline=2,context=2,data=1", 4, pipeline(microbatches=4)),
    Case("dense", "pipeline=2,context=2,fsdp=2,data=1", 8, pipeline(microbatches=4)),
    Case("dense", "pipeline=3,data=1", 3, pipeline(microbatches=8)),  # M not divisible by S, layers neither
    Case("deep", "pipeline=3,data=1", 3, pipeline(virtual_stages=2, microbatches=8)),  # the last group is not full
    Case("deep", "pipeline=3,data=2", 6, pipeline(virtual_stages=2, microbatches=4, residuals="save")),
    Case("odd", "pipeline=2,fsdp=2,data=1", 4, pipeline(virtual_stages=2, microbatches=2), ACCUMULATION),
    Case("halves", "pipeline=2,fsdp=2,tensor=2,data=1", 8, pipeline(virtual_stages=2, microbatches=4)),
    Case("halves", "pipeline=4,tensor=2,data=1", 8, pipeline(microbatches=4)),
    Case("balanced", "pipeline=2,fsdp=2,data=1", 4, pipeline(microbatches=4), ACCUMULATION),
    Case("balanced", "pipeline=2,tensor=2,data=2", 8, pipeline(virtual_stages=2, microbatches=4)),
]

FLAT = [
    *(
        Case(variant, mesh, devices, (), more)
        for variant in ("dense", "odd", "experts")
        for mesh, devices, more in (
            ("data=8", 8, ()),
            ("fsdp=8,data=1", 8, ()),
            ("tensor=4,data=2", 8, ACCUMULATION),
            ("data=2,fsdp=2,tensor=2", 8, ()),
            ("context=2,data=4", 8, ()),
            ("context=4,tensor=2,data=1", 8, ()),
            ("context=2,fsdp=2,tensor=2,data=1", 8, ACCUMULATION),
        )
    ),
    *(
        Case(variant, mesh, devices, (), more)
        for variant in ("experts", "balanced")
        for mesh, devices, more in (
            ("expert=2,data=1", 2, ()),
            ("expert=4,data=2", 8, ()),
            ("expert=2,tensor=2,fsdp=2,data=1", 8, ACCUMULATION),
            ("expert=2,fsdp=2,data=2", 8, ()),
            ("expert=4,tensor=2,data=1", 8, ()),
        )
    ),
    Case("dense", "context=2,fsdp=2,tensor=2,data=1", 8),
    Case("experts", "expert=2,fsdp=2,data=1", 4),
    Case("tied", "context=8,data=1", 8, (), ACCUMULATION),
    Case("tied", "context=2,tensor=4,data=1", 8),
    Case("tied", "fsdp=4,tensor=2,data=1", 8),
    Case("balanced", "context=2,fsdp=2,data=2", 8),
    Case("dense", "data=4,fsdp=2", 8, (), (("sharding", {"gradient_axes": ["data"], "optimizer_axes": ["data"]}),)),
]

FORMS = [
    *(
        Case(variant, mesh, devices, section)
        for variant in ("windows", "sinks", "latent", "parallel", "post", "unplaced")
        for mesh, devices, section in (
            ("fsdp=2,tensor=4,data=1", 8, ()),
            ("context=2,fsdp=2,tensor=2,data=1", 8, ()),
            ("pipeline=2,fsdp=2,tensor=2,data=1", 8, pipeline(microbatches=4)),
        )
    ),
    Case("windows", "pipeline=2,context=2,data=2", 8, pipeline(virtual_stages=2, microbatches=4)),
    Case("sinks", "expert=2,tensor=2,fsdp=2,data=1", 8),
    Case("sinks", "pipeline=2,expert=2,data=1", 4, pipeline(microbatches=4)),
    Case("latent", "expert=4,tensor=2,data=1", 8),
    Case("latent", "context=4,data=2", 8, (), (("context", {"method": "ulysses"}),)),
    Case("latent", "pipeline=2,expert=2,data=1", 4, pipeline(virtual_stages=2, microbatches=2)),
]
"""What the families of Hugging Face have beside the plain decoder."""


@pytest.mark.parametrize("case", SMOKE, ids=str)
def test_a_few_meshes_give_the_answer_of_one_device(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", [*STAGED, *FLAT, *FORMS], ids=str)
def test_every_mesh_gives_the_answer_of_one_device(case):
    check(case)


@pytest.mark.grid
@pytest.mark.timeout(900)
def test_sixteen_devices_give_the_answer_of_one():
    flags = "--xla_force_host_platform_device_count=16"
    run = subprocess.run(
        [sys.executable, "-m", "tests.parity.grid"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count(" ok\n") == len(SIXTEEN)


def test_the_grid_is_as_large_as_promised():
    assert len({str(case) for case in [*SMOKE, *STAGED, *FLAT, *FORMS, *SIXTEEN]}) >= 60
