"""All measurements of jitrope, over one harness. In a checkout: `jitrope bench NAME`, `python -m examples.bench NAME`.

Begin reading in `harness.py`: a `Case` says what is timed beside what, `measure` times it. A benchmark is a file with
cases, a command and a `Section`: `report.py` prints its rows, and `results.py` (`bench report`) writes the kept ones to
examples/results/README.md, with the plots. `--smoke` runs any of them on tiny shapes, on the CPU too, where the times
say nothing.
"""
