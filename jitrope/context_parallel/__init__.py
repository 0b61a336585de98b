"""Context parallelism: packed batches cut between ranks, and attention over them, on torch.distributed.

Every rank gathers the keys and values that its queries see. It has two chunks of each sequence, so a causal mask gives
all ranks equal work. Llama 3 was trained this way (arXiv:2407.21783, section 3.3.2), and TransformerEngine's
`all_gather` does the same, but here sequences may have any length.

>>> from jitrope.context_parallel import Schedule, all_gather_attention
>>> cu_seqlens, qkv = torch.tensor([0, 7, 10]), torch.randn(10, 12, 64)  # the whole batch, the same on all ranks
>>> schedule = Schedule(cu_seqlens, 10)
>>> q, k, v = schedule.shard(qkv).split((8, 2, 2), dim=1)  # this rank's rows
>>> out = schedule.unshard(all_gather_attention(q, k, v, schedule))  # (10, 8, 64)

.. include:: README.md
"""

from .attention import all_gather_attention
from .rotary import Rope
from .schedule import Schedule
from .shards import Partition

__all__ = ["Partition", "Rope", "Schedule", "all_gather_attention"]
