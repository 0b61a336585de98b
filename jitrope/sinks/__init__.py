"""Where the results of a call go, in plain torch: tensors, and caches by slots or pages."""
