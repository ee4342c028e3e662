"""Save and load what training goes on from, through torch's distributed checkpoint.

Tensors carry their global names (layers counted over the whole model, a tied copy under its
owner's name), so a checkpoint loads into any other PP, VPP, DP or EP.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime import checkpoint_folder
from mfsdp_cli.runtime.checkpoint_folder import Checkpoint
from mfsdp_cli.runtime.engine import Engine
from mfsdp_cli.runtime.pieces import LoadPlanner, SavePlanner

if TYPE_CHECKING:
    from mfsdp_cli.model.spec import ModelSpec
    from mfsdp_cli.runtime.topology import Topology


def save(run_dir: Path, step: int, engine: Engine, spec: ModelSpec, topology: Topology) -> None:
    """Save after a step; a collective. The checkpoint before stays until this one is whole."""
    folder = checkpoint_folder.partial(run_dir, step)
    if topology.rank == 0:
        checkpoint_folder.begin(run_dir, step)
    topology.barrier()
    state = {name: pieces for name, pieces in engine.state(saving=True).items() if pieces.parts}
    dcp.save(state, storage_writer=FileSystemWriter(folder), planner=SavePlanner())
    topology.barrier()
    if topology.rank == 0:
        checkpoint_folder.complete(run_dir, step, spec)


def load(checkpoint: Checkpoint, engine: Engine) -> None:
    """Load into an engine; a collective.

    Raises:
        MfsdpError: MF531 naming a tensor that is missing or has another size, MF532 where a file
            cannot be read.
    """
    state = engine.state(saving=False)
    reader = FileSystemReader(checkpoint.folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a damaged file raises
        raise _damaged(checkpoint, error) from error
    for name, pieces in state.items():
        size = getattr(saved.get(name), "size", None)
        if size != pieces.size():
            what = "has no such tensor" if size is None else f"has {size.numel()} elements of it"
            raise MfsdpError(
                "MF531",
                f"the checkpoint {checkpoint.folder} is of another model: {name} has"
                f" {pieces.size().numel()} elements here, the checkpoint {what}",
                where=str(checkpoint.folder),
            )
    try:
        dcp.load(state, storage_reader=reader, planner=LoadPlanner())
    except Exception as error:
        raise _damaged(checkpoint, error) from error
    engine.loaded(checkpoint.step)


def _damaged(checkpoint: Checkpoint, error: Exception) -> MfsdpError:
    return MfsdpError(
        "MF532",
        f"the checkpoint {checkpoint.folder} cannot be read: {type(error).__name__}",
        where=str(checkpoint.folder),
    )
