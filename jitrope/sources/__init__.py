"""Where q, k and v come from, and a call as a source, stages and a sink."""
