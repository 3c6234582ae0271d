-- Batch norm over the microbatches of all replicas: a job for tests of `dtrain check`.
local dt = require "dtrain"
local nn = dt.nn

local args = dt.args { samples = 64, sync = true }

return dt.job {
  model = nn.Sequential { nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, { sync = args.sync }), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3) },
  loss = nn.CrossEntropy(), data = dt.data.synthetic { inputs = { 1, 8, 8 }, classes = 3, samples = args.samples }, batch = 16,
  optimizer = dt.optim.SGD { lr = 0.1 }, steps = 3,
}
