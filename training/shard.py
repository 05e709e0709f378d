"""A run whose weights, gradients and optimiser state are shared out over its processes.

For models beyond one GPU's memory (the setting `shard`). The engine is PyTorch's own, fully_shard
(FSDP2; Zhao et al., 2023, "PyTorch FSDP"): every process keeps its rows of each parameter, and a
layer's are put together, from all processes, while it is at work. Checkpoints are those of any run.

What is here: sharing out a model; putting together what a checkpoint holds, and taking it apart;
and what is different where processes send messages within forward and backward. The imports of
torch.distributed are inside the functions: they take half a second, and few runs need them.
"""

import contextlib

import torch
import torch.distributed as dist

from config import Config
from formats.run_folder import tensors_in
from generating.load import NoInit
from hardware import out_of_memory
from model import GPT
from training import distributed
from training.errors import RunError
from training.memory import Memory, MicroBatch, attempt, largest_divisor


def wanted(config: Config) -> bool:
    """Whether the run shares out its model: one process alone has nobody to share with."""
    return config.shard and distributed.world_size > 1


def sharded(model: torch.nn.Module) -> bool:
    """Whether a model is shared out."""
    return any(map(is_dtensor, model.parameters()))


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether this process keeps only a part of a tensor, which then is a DTensor."""
    return hasattr(tensor, "full_tensor")


# -- the model -------------------------------------------------------------------------------------


def shard_model(model: GPT, device: torch.device) -> None:
    """Leave each process its rows of the parameters of `model`, on its device, in place.

    A layer is whole only while it computes; embeddings, head and last norm are whole from the
    forward to the end of the backward. After each micro-batch the gradients are summed, each
    process's rows to it alone; forward_backward() has divided them. All of this is in float32, and
    autocast does the rest: so the losses are those of a run that shares nothing.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (distributed.world_size,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def compile_or_end(model, x, y, cast, scaler):
    """(model, None), its layers and its head compiled in place after a trial on x, y: int64 [B, T].

    What messages go between the processes lies outside of the compiled parts. Raises RunError
    where it fails: the others cannot be told to go on without.
    """
    for block in model.h:
        block.forward = torch.compile(block.forward, dynamic=False)
    model.head = torch.compile(model.head, dynamic=False)
    try:
        with cast():
            loss = model(x, y)
        scaler.scale(loss).backward()
    except Exception as error:
        if out_of_memory(error) or broken(error):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise RunError(
            f"the model could not be compiled ({type(error).__name__}: {lines[0]}); with shard = "
            "True set compile = False"
        ) from None
    model.zero_grad(set_to_none=True)
    return model, None


# -- checkpoints -----------------------------------------------------------------------------------


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor put together from the parts of all processes, on the device; any other as it is.

    All processes have to call it at the same point. Raises Lost.
    """
    if not is_dtensor(tensor):
        return tensor
    with messages():
        return tensor.full_tensor()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, of which the tensor is made; any other as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole_model(model: GPT) -> GPT | None:
    """A copy of a model that is shared out, in the first process's RAM; None in the others.

    A model that is not shared out is returned itself.
    """
    if not sharded(model):
        return model
    tensors = {}
    for name, tensor in model.state_dict().items():
        full = full_tensor(tensor)
        if distributed.is_main:
            tensors[name] = full.cpu()
    if not distributed.is_main:
        return None
    with NoInit():
        copy = GPT(model.config)
    copy.load_state_dict(tensors)
    return copy


def gather_to_main(*states: dict) -> None:
    """Take part in the first process's save, which puts together the same tensors in this order."""
    for value in states:
        for tensor in tensors_in(value):
            full_tensor(tensor)


def distribute_state(state: dict, parameters: list[torch.Tensor]) -> None:
    """Leave this process its part of each tensor in an optimiser's state, in place.

    state: of each of `parameters` by its number, whole, as a checkpoint holds it.
    """
    for number, p in enumerate(parameters):
        for name, value in state.get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                state[number][name] = distribute(value, p)


def distribute(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's rows of a whole tensor, where `like` is shared out; else the tensor itself."""
    if not is_dtensor(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    # The copy lets go of the whole.
    return distribute_tensor(value, mesh, placements, src_data_rank=None).clone()


# -- memory and messages ---------------------------------------------------------------------------


class FixedMicroBatch(MicroBatch):
    """Sequences at once that stay as many, for work within which processes send messages."""

    def run(self, work, buckets=None):
        """work(sequences at once); there are no buckets.

        Raises RunError where memory runs out: the other processes wait for messages in the middle
        of the same work, so none can begin anew. They hear of the end of this one, and raise Lost.
        """
        with messages():
            result, fits = attempt(work, self.size)
        if not fits:
            raise RunError(self.memory.too_much(self.size))
        return result


class FixedMemory(Memory):
    """The micro-batches of a run that shares out its model."""

    def micro_batch(self, name: str, size: int) -> FixedMicroBatch:
        """What holds one of the sizes and works with it."""
        return FixedMicroBatch(name, size, self)

    def too_much(self, size: int) -> str:
        """What to say when so many sequences are too many."""
        if size == 1:
            return self.too_small()
        smaller = largest_divisor(self.batch, size // 2)
        return (
            f"out of memory with {size} sequences at once, which a run with shard = True cannot "
            f"make fewer by itself. Start it again with --micro_batch_size={smaller}: it continues "
            f"at its last checkpoint, with the same {self.config.batch_size} a step"
        )


@contextlib.contextmanager
def messages():
    """Work within which processes send messages: one that fails raises Lost."""
    try:
        yield
    except RuntimeError as error:
        if not broken(error):
            raise
        raise distributed.Lost(str(error)) from None


def broken(error: Exception) -> bool:
    """Whether an error says that a message between processes failed."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
