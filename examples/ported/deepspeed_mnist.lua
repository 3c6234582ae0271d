-- DeepSpeed's MNIST example: half precision with a dynamic loss scale, Adam and ZeRO-2, all from the JSON file as it is.
--   mpirun -n 2 dtrain examples/ported/deepspeed_mnist.lua                  Fashion-MNIST of Debian's dataset-fashion-mnist
--   mpirun -n 2 dtrain examples/ported/deepspeed_mnist.lua --dir mnist      a folder with train-images-idx3-ubyte.gz ...
local dt = require "dtrain"
local nn, data = dt.nn, dt.data

local here = arg[0]:match "^.*/" or ""
local args = dt.args { deepspeed_config = here .. "deepspeed_mnist.json", epochs = 5,
  dir = { default = "/usr/share/datasets/fashion-mnist", help = "folder of the IDX files" } }

local function set(name)
  return data.idx { images = args.dir .. "/" .. name .. "-images-idx3-ubyte.gz",
    labels = args.dir .. "/" .. name .. "-labels-idx1-ubyte.gz",
    transforms = { data.flatten() } }
end

return dt.deepspeed {
  config = args.deepspeed_config,
  model = nn.Linear(784, 10),
  loss = nn.CrossEntropy(),
  data = { train = set "train", valid = set "t10k" },
  epochs = args.epochs,
  eval = { metrics = { "accuracy" } },
}
