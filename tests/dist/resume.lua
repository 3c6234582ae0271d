-- A job that keeps checkpoints, with all that a run must remember: momentum, moments, a schedule, dropout, shuffled data that ends
-- inside an epoch, a loss scale.   dtrain tests/dist/resume.lua --dir runs/x --every 5 [--precision f16] [--slow 0.01]
local dt = require "dtrain"
local core = require "dtrain.core"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { dir = "runs/resume", every = 5, keep = 3, slow = 0.0,
  precision = { default = "f32", choices = { "f32", "bf16", "f16" } } }

-- a data set that takes its time, for tests that interrupt a run
local function sample(i)
  if args.slow > 0 then core.sleep(args.slow / 16) end
  local x = {}
  for k = 1, 8 do x[k] = math.sin(i * k) end
  return x, { x[1] * x[2], x[3] - x[8] }
end

return dt.job {
  model = nn.Sequential { nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2) },
  loss = nn.MSE(),
  data = data.from(sample, 75),
  batch = { global = 16, micro = 4 },
  optimizer = optim.AdamW { lr = 1e-2, weight_decay = 0.01 },
  schedule = optim.cosine { total = 100 },
  precision = args.precision,
  clip = 1.0,
  steps = 12,
  checkpoint = { dir = args.dir, every = args.every, keep = args.keep },
}
