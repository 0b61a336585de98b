"""Context parallelism: packed batches cut between ranks, and attention over them, on torch.distributed."""

from .attention import all_gather_attention
from .backends import backends
from .interface import Case
from .rotary import Rope
from .schedule import Schedule
from .shards import Partition, local_cu_seqlens, partition_indices, position_ids, shard, unshard

__all__ = [
    "Case",
    "Partition",
    "Rope",
    "Schedule",
    "all_gather_attention",
    "backends",
    "local_cu_seqlens",
    "partition_indices",
    "position_ids",
    "shard",
    "unshard",
]
