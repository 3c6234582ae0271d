return { name = "recompute", options = {} }
