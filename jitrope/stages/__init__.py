"""The stages of a call in plain torch, one file each, on heads (batch, seq, heads, head_dim). `chain` calls them.

forward(letter, x, t, o) -> heads. letter: "q", "k", "v" or "gate", whose heads a stage returns as they are if it does
not apply to them. t: the call's tensors by name, with heads by letter. o: its options. The gradient of x is the same
function of the gradient, inverse in a rotation. A norm has a `back`, which also finds the gradients of its tensors. A
bias is added as a projection is read, and a conversion has no gradient.
"""
