-- A loop of one's own: the engine gives batches, takes steps, evaluates and saves; what happens in between is yours.
-- Here training ends when the evaluation has stopped improving.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { lr = 0.05, patience = 3, save = "" }

local job = dt.job {
  model     = nn.Sequential { nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 5) },
  loss      = nn.MSE(),
  data      = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 1200 }:split { train = 1000, valid = 200 },
  batch     = 32,
  optimizer = optim.SGD { lr = args.lr, momentum = 0.9 },
  clip      = 1.0,
  steps     = 2000,
}

local engine = dt.engine(job)
local best, waited = math.huge, 0
for step, batch in engine:batches() do
  local m = engine:step(batch)
  if step % 50 == 0 then
    local valid = engine:eval().loss
    if dt.rank() == 0 then print(("step %4d  loss %.4f  valid %.4f  norm %.3f"):format(step, m.loss, valid,
      m.grad_norm)) end
    if valid < best * 0.999 then
      best, waited = valid, 0
    else
      waited = waited + 1
    end
    if waited == args.patience then break end
  end
end
if args.save ~= "" then engine:save(args.save) end
if dt.rank() == 0 then print(("best validation loss %.4f"):format(best)) end
