"""Dovetail: compile a model for a machine and a workload into one artifact, and serve it.

Names load when first used: `import dovetail` pulls in neither the compiler nor the runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.compiler.pipeline import compile_model as compile
    from dovetail.compiler.tune.model import tune_model as tune
    from dovetail.errors import (
        ArtifactError,
        CapacityError,
        DovetailError,
        RequestError,
        ScheduleError,
        SpecError,
        SyntaxDiagnostic,
        ToolchainError,
        WorkflowError,
    )
    from dovetail.ffi import kernels
    from dovetail.import_haystack import from_haystack
    from dovetail.import_langgraph import from_langgraph
    from dovetail.ir.ragraph import RAGraph
    from dovetail.ir.workflow import END, START
    from dovetail.loading import load
    from dovetail.runtime.app import App
    from dovetail.runtime.embed.settings import EmbeddingSettings
    from dovetail.runtime.flows.control.settings import WavefrontSettings
    from dovetail.runtime.flows.control.transformation import (
        Transformation,
        register_transformation,
        unregister_transformation,
    )
    from dovetail.runtime.flows.gpu_memory import GpuShare
    from dovetail.runtime.flows.service import FlowSettings
    from dovetail.runtime.schedule.plan import SchedulerSettings

__version__ = "0.1.0"

__all__ = [
    "END",
    "START",
    "App",
    "ArtifactError",
    "CapacityError",
    "DovetailError",
    "EmbeddingSettings",
    "FlowSettings",
    "GpuShare",
    "RAGraph",
    "RequestError",
    "ScheduleError",
    "SchedulerSettings",
    "SpecError",
    "SyntaxDiagnostic",
    "ToolchainError",
    "Transformation",
    "WavefrontSettings",
    "WorkflowError",
    "__version__",
    "compile",
    "from_haystack",
    "from_langgraph",
    "kernels",
    "load",
    "register_transformation",
    "tune",
    "unregister_transformation",
]

_HOMES = {
    "App": "dovetail.runtime.app",
    "END": "dovetail.ir.workflow",
    "EmbeddingSettings": "dovetail.runtime.embed.settings",
    "FlowSettings": "dovetail.runtime.flows.service",
    "GpuShare": "dovetail.runtime.flows.gpu_memory",
    "RAGraph": "dovetail.ir.ragraph",
    "START": "dovetail.ir.workflow",
    "SchedulerSettings": "dovetail.runtime.schedule.plan",
    "Transformation": "dovetail.runtime.flows.control.transformations",
    "WavefrontSettings": "dovetail.runtime.flows.control.settings",
    "compile": "dovetail.compiler.pipeline",
    "from_haystack": "dovetail.import_haystack",
    "from_langgraph": "dovetail.import_langgraph",
    "kernels": "dovetail.ffi",
    "load": "dovetail.loading",
    "register_transformation": "dovetail.runtime.flows.control.transformations",
    "tune": "dovetail.compiler.tune.model",
    "unregister_transformation": "dovetail.runtime.flows.control.transformations",
}
"""Modules of public names, which have them for types as above; all others are errors. That of
transformations registers ours first, before those of a user."""
_NAMED = {"compile": "compile_model", "tune": "tune_model"}


def __getattr__(name: str) -> Any:
    """Import the home of a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    module = importlib.import_module(_HOMES.get(name, "dovetail.errors"))
    value = getattr(module, _NAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
