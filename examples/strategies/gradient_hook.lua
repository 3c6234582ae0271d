-- A gradient hook: how a bucket travels is a traced function of one's own. This one sends the signs and one size, and adds what
-- it did not send to the next gradient.
--   dtrain explain examples/strategies/gradient_hook.lua --ranks 4   look at: u8 and 4 bytes a bucket instead of f32
--   mpirun -n 2 dtrain examples/strategies/gradient_hook.lua         look at: the loss falls all the same
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local function signs(bucket, info)
  local owed = info:state("owed", bucket:shape())
  local x = bucket + owed
  local size = dt.abs(x):mean()
  info:assign(owed, x - dt.where(dt.ge(x, 0), size, -size))
  local bits = dt.pack_signs(x):all_gather "data":reshape { info.ranks, bucket:numel() // 8 }
  local sizes = size:reshape { 1 }:all_gather "data":reshape { 1, info.ranks }
  return sizes:matmul(dt.unpack_signs(bits)):reshape(bucket:shape()) / info.ranks
end

return dt.job {
  model = nn.Sequential { nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4) },
  loss = nn.MSE(),
  data = data.synthetic { inputs = { 32 }, targets = { 4 }, samples = 1024 },
  batch = 64,
  optimizer = optim.SGD { lr = 0.05 },
  steps = 100,
  parallel = { gradient = { hook = signs } }, -- or dt.hooks.powersgd { rank = 2 }, dt.hooks.one_bit, ...
}
