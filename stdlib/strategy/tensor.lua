return { name = "tensor", options = {} }
