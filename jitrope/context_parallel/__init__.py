"""Context parallelism: packed batches cut between ranks, and attention over them, on torch.distributed.

Every rank gathers the keys and values that its queries see. It has two chunks of each sequence, so a causal mask gives
all ranks equal work. Llama 3 was trained this way (arXiv:2407.21783, section 3.3.2), and TransformerEngine's
`all_gather` does the same, but here sequences may have any length.

>>> from jitrope.context_parallel import Partition, Schedule, all_gather_attention
>>> part = Partition(cu_seqlens, tokens, group=group)
>>> q, k, v = (part.shard(x) for x in (q, k, v))                                       # (T, H, D) to (t, H, D)
>>> out = all_gather_attention(q, k, v, cu_seqlens, tokens=tokens, group=group)        # (t, Hq, D)

.. include:: README.md
"""

from .attention import all_gather_attention
from .backends import backends
from .interface import Case
from .rotary import Rope
from .schedule import Schedule
from .shards import Partition

__all__ = ["Case", "Partition", "Rope", "Schedule", "all_gather_attention", "backends"]
