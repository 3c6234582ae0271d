return { name = "pipeline", options = {} }
