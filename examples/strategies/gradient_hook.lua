-- A gradient hook: what happens to a bucket of gradients on its way, in tensor operations that are traced once and run
-- natively inside the bucket pipeline. This one sends 16 bits and keeps what was rounded off for the next step.
--   mpirun -n 2 dtrain examples/strategies/gradient_hook.lua
--   dtrain explain examples/strategies/gradient_hook.lua --ranks 2     all-reduces of bf16: half the bytes
--   dtrain check examples/strategies/gradient_hook.lua --ranks 2       differs from one process by the rounding
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local function rounded_with_feedback(bucket)
  local left = bucket:state "left" -- zeros at first; part of a checkpoint
  local wanted = bucket + left
  local sent = wanted:to "bf16"
  left:assign(wanted - sent:to "f32")
  return sent:all_reduce("data", "mean"):to "f32"
end

return dt.job {
  model     = nn.Sequential { nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10) },
  loss      = nn.CrossEntropy(),
  data      = data.synthetic { inputs = { 32 }, classes = 10, samples = 512 },
  batch     = 32,
  optimizer = optim.AdamW { lr = 1e-3 },
  steps     = 50,
  parallel  = { gradient = { hook = rounded_with_feedback } },
}
