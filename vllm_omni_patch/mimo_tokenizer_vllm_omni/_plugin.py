"""The entry point."""

from __future__ import annotations

from . import _code2wav, _data_parser, _devices, _pipeline_parallel, _settings

_registered = False


def register() -> None:
    """Have the engine's modules changed when they are imported, or now those that are already.

    vLLM-Omni calls this in the front end, the engine core and every worker, of other models' engines too; nothing is
    imported for it. It may be called any number of times. Nothing is raised here or by an import: what must not start
    says so when it is constructed, where the engine shows it to people.
    """
    global _registered
    if _registered:
        return
    # Here: what only asks for the plugin's names needs no wrapt.
    import wrapt

    _registered = True
    # The in-process repairs go first: the remote parts are put around them.
    for part in (_pipeline_parallel, _devices, _code2wav, _data_parser, _settings):
        for module, patch in part.PATCHES.items():
            wrapt.register_post_import_hook(patch, module)
