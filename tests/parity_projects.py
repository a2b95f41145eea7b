"""The four projects whose own code the parity tests run: imported once, or skipped with the reason.

verl and OpenRLHF pin other releases of transformers than we test with, so they are installed without dependencies
(parity.txt), and what their modules import but nothing here calls (Ray, DeepSpeed, vLLM, ...) is stood in for while
they are imported: a module whose every attribute is an empty class. The stand-ins are gone afterwards, so that no
library takes one for the real package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import platform
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

VERSIONS = {"trl": "1.16.0", "liger-kernel": "0.8.5", "verl": "0.9.1", "openrlhf": "0.11.2"}
"""What the presets are proved against."""

ALL_HERE = (sys.version_info[:2], sys.platform, platform.machine()) == ((3, 11), "linux", "x86_64")
"""Where every one of them has a release that can be installed; OpenRLHF's wheel is for nothing else."""

ABSENT = (
    "aiohttp", "codetiming", "deepspeed", "flash_attn", "hydra", "omegaconf", "orjson", "pylatexenc", "ray",
    "tensordict", "torchdata", "vllm",
)  # fmt: skip


def why_missing(project: str) -> str | None:
    """Why the tests of a project cannot run here; None: they can."""
    wanted = VERSIONS[project]
    try:
        found = importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return f"{project} {wanted} is not installed; parity.txt lists it where it has a release for this Python"
    return None if found == wanted else f"{project} {found} is installed; the preset is proved against {wanted}"


def need(project: str) -> None:
    """Skip the test module where a project is missing, and say why."""
    reason = why_missing(project)
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)


def unchanged(*decorated: Any, **_: Any) -> Any:
    """A decorator, with or without arguments, that leaves what it decorates as it is."""
    return decorated[0] if decorated else unchanged


class StandIn(ModuleType):
    """A module that has everything and does nothing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return unchanged if (self.__name__, name) == ("ray", "remote") else type(name, (), {})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of ABSENT that are not installed, and whatever is looked for inside them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    finder = StandInFinder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other projects' imports
        for library in ("transformers", "accelerate", "peft", "trl"):  # which look for some of ABSENT when imported
            if importlib.util.find_spec(library) is not None:
                importlib.import_module(library)
        sys.meta_path.append(finder)  # last: what is installed is found first
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
                del sys.modules[name]


@functools.cache
def verl() -> types.SimpleNamespace:
    """verl's `core_algos`, actor loss, rollout correction and actor config."""
    with stand_ins():
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        losses = importlib.import_module("verl.workers.utils.losses")
        rollout = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
        config = importlib.import_module("verl.workers.config")
    return types.SimpleNamespace(core=core, losses=losses, rollout=rollout, config=config)


@functools.cache
def openrlhf() -> types.SimpleNamespace:
    """OpenRLHF's losses, KL estimators, actor trainer and experience maker."""
    with stand_ins():
        loss = importlib.import_module("openrlhf.models.loss")
        utils = importlib.import_module("openrlhf.models.utils")
        actor = importlib.import_module("openrlhf.trainer.ray.ppo_actor")
        maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    return types.SimpleNamespace(loss=loss, utils=utils, actor=actor, maker=maker)


class Wide(torch.Tensor):
    """A float64 tensor that stays one: some of the projects cast to float32 with `.float()` on the way."""

    def float(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.double()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, and every result of it, without casts to float32."""
    return tensor.as_subclass(Wide)
