-- Fashion-MNIST by a small convolutional network: about 91 % after 2 epochs.
-- The images come with Debian's dataset-fashion-mnist.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args {
  lr = 1e-3, epochs = 2,
  dir = { default = "/usr/share/datasets/fashion-mnist", help = "folder of the IDX files" },
}

local function set(name)
  return data.idx { images = args.dir .. "/" .. name .. "-images-idx3-ubyte.gz",
    labels = args.dir .. "/" .. name .. "-labels-idx1-ubyte.gz", transforms = { data.reshape { 1, 28, 28 } } }
end

local model = nn.Sequential {
  nn.Conv2d(1, 32, 3), nn.ReLU(),
  nn.Conv2d(32, 64, 3), nn.ReLU(),
  nn.MaxPool2d(2), nn.Flatten(),
  nn.Linear(9216, 128), nn.ReLU(),
  nn.Linear(128, 10),
}

return dt.job {
  model     = model,
  loss      = nn.CrossEntropy(),
  data      = { train = set "train", valid = set "t10k" },
  batch     = 64,
  optimizer = optim.Adam { lr = args.lr },
  epochs    = args.epochs,
  eval      = { every = 938, metrics = { "accuracy" } },
}
