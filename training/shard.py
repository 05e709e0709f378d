"""A run whose weights, gradients and optimiser state are split over its processes.

For models beyond one GPU's memory (the setting `shard`). The engine is PyTorch's own, fully_shard
(FSDP2; Zhao et al., 2023, "PyTorch FSDP"): every process keeps its rows of each parameter, and
gathers those of a layer from all processes while the layer is at work. Checkpoints are those of
any run.

The imports of torch.distributed are inside the functions: they take half a second, and few runs
need them.
"""

import torch

from formats.run_folder import tensors_in
from generating.load import model_of
from model import GPT
from training import distributed


def is_sharded(model: torch.nn.Module) -> bool:
    return any(map(is_dtensor, model.parameters()))


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether this process keeps only a part of a tensor, which then is a DTensor."""
    return hasattr(tensor, "full_tensor")


# -- the model -------------------------------------------------------------------------------------


def shard_model(model: GPT, device: torch.device) -> None:
    """Leave each process its rows of the parameters of `model`, on its device, in place.

    A layer is whole only while it computes; embeddings, head and last norm are whole from the
    forward to the end of the backward. After each micro-batch each process has the mean of the
    gradients of its rows. All of this is in float32, and autocast does the rest: so the losses are
    those of a run that is not sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (distributed.world_size,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def compile_in_place(model: GPT, mode: str | None) -> GPT:
    """Compile the layers and the head, each alone: the processes send in between."""
    for block in model.h:
        block.forward = torch.compile(block.forward, dynamic=False, mode=mode)
    model.head = torch.compile(model.head, dynamic=False, mode=mode)
    return model


# -- checkpoints -----------------------------------------------------------------------------------


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor gathered from the shards of all processes, on the device; any other as it is.

    All processes have to call it at the same point.
    """
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, of which the tensor is made; any other as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full_model(model: GPT) -> GPT | None:
    """A copy of a sharded model in the first process's RAM, None in the others.

    A model that is not sharded is returned itself.
    """
    if not is_sharded(model):
        return model
    tensors = {}
    for name, tensor in model.state_dict().items():
        full = full_tensor(tensor)
        if distributed.is_main:
            tensors[name] = full.cpu()
    return model_of(model.config, tensors) if distributed.is_main else None


def gather_to_main(*states: dict) -> None:
    """Take part in the first process's save, which puts together the same tensors in this order."""
    for value in states:
        for tensor in tensors_in(value):
            full_tensor(tensor)


def distribute(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's rows of a whole tensor, where `like` is sharded; else the tensor itself."""
    if not is_dtensor(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


# -- stacks of parameters that are alike -----------------------------------------------------------


def gather_rows(stack: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N, rows of this process, C] -> [N, R, C]: N tensors as whole as the parameter `like` is.

    They travel in bfloat16 where `dtype` has 16 bits: in float16 small numbers would be lost.
    """
    if not is_dtensor(like):
        return stack
    stack = stack.bfloat16() if dtype.itemsize == 2 else stack
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((len(stack), *like.shape))
    stride = (like.numel(), like.size(1), 1)
    mesh = like.device_mesh
    return DTensor.from_local(stack, mesh, [Shard(1)], shape=shape, stride=stride).full_tensor()


def local_rows(stack: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[N, R, C] -> [N, rows of this process, C], where the parameter `like` is sharded."""
    if not is_dtensor(like):
        return stack
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(stack, like.device_mesh, [Shard(1)], src_data_rank=None).to_local()
