-- Fashion-MNIST by a perceptron with one hidden layer: about 88 % after 10 epochs.
-- The images come with Debian's dataset-fashion-mnist.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args {
  lr = 1e-3, hidden = 128, epochs = 10,
  dir = { default = "/usr/share/datasets/fashion-mnist", help = "folder of the IDX files" },
}

local function set(name)
  return data.idx { images = args.dir .. "/" .. name .. "-images-idx3-ubyte.gz",
    labels = args.dir .. "/" .. name .. "-labels-idx1-ubyte.gz", transforms = { data.flatten() } }
end

return dt.job {
  model     = nn.Sequential { nn.Linear(784, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10) },
  loss      = nn.CrossEntropy(),
  data      = { train = set "train", valid = set "t10k" },
  batch     = 64,
  optimizer = optim.Adam { lr = args.lr },
  epochs    = args.epochs,
  eval      = { every = 938, metrics = { "accuracy" } },
}
