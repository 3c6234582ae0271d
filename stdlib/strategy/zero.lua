return { name = "zero", options = {} }
