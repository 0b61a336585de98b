"""The stages of a call in plain torch, one file each, on heads (batch, seq, heads, head_dim).

forward(letter, x, t, o) -> heads; back(letter, x, grad, t, o, found) -> the gradient of x, and in `found` those of the
stage's own tensors. letter: "q", "k", "v" or "gate". x: what the norm read. t: the call's tensors by name, with heads
by letter. o: its options.
"""
