"""The stages of a call in plain torch, one file each, on heads (batch, seq, heads, head_dim). `chain` calls them.

forward(letter, x, t, o) -> heads. back(letter, x, grad, t, o, found) -> the gradient of x, and in `found` those of the
stage's own tensors; a bias is added as a projection is read, and a conversion has no gradient. letter: "q", "k", "v" or
"gate", whose heads a stage returns as they are if it does not apply to them. x: in `back` what the norm read. t: the
call's tensors by name, with heads by letter. o: its options.
"""
