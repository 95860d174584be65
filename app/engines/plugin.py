"""What runs in each of an engine's processes: a plugin of vLLM (entry point group ``vllm.general_plugins``).

vLLM calls ``register`` in every process it starts, before a worker is made. Without the environment of a
specduel server it only mends the CPU backend, so ``vllm serve`` in the same environment is right as well.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os

from app.engines import cpu_mend, marks


def register() -> None:
    """Mend the CPU sampler; report phases and errors of the start-up to the server that asked for them."""
    cpu_mend.install()
    path = os.environ.get(marks.MARKS)
    # Neither in the server itself, nor in a helper that vLLM runs to look at a model's class.
    if not path or os.environ.get(marks.OWNER) == str(os.getpid()) or multiprocessing.parent_process() is None:
        return
    logger = logging.getLogger("vllm")
    # The marks need INFO. A log file may have it too; a terminal keeps the level it was given.
    logger.setLevel(logging.INFO)
    if log := os.environ.get(marks.LOG):
        marks.redirect_output(log)
        for handler in logger.handlers:
            handler.setLevel(logging.INFO)
    writer = marks.Writer(path)
    logger.addHandler(marks.MarkHandler(writer))
    if multiprocessing.current_process().name.startswith("EngineCore"):
        writer.phase("Starting the worker")
    else:
        writer.phase("Preparing the model")
        # At its end, a worker's interpreter takes seconds to take itself apart, and the engine waits for that.
        atexit.register(os._exit, 0)
