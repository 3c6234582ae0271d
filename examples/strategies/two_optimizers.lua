-- A generative adversarial network (Goodfellow et al. 2014): two engines take steps in turn on one set of parameters.
-- Each has a loss and an optimizer of its own and trains what its job does not freeze; under any strategy both see what
-- the other has changed.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local Players = nn.module "Players"
function Players:init()
  self.maker = nn.Sequential { nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2) }
  self.judge = nn.Sequential { nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1) }
end
function Players:forward(noise) return self.judge(self.maker(noise)) end
local players, samples = Players(), dt.randn({ 512, 2 }, 7) * 0.5 + 2
local set = data.tensors { inputs = dt.randn({ 512, 2 }, 8), targets = samples }
local function job(lr, freeze, loss)
  return dt.job { model = players, loss = loss, freeze = freeze, data = set, batch = 64, steps = 40,
    optimizer = optim.Adam { lr = lr }, parallel = { data = "auto" } }
end
local judge = dt.engine(job(5e-3, players.maker,
  function(fake, real) return dt.softplus(-players.judge(real)):mean() + dt.softplus(fake):mean() end))
local maker = dt.engine(job(2e-3, players.judge, function(fake) return dt.softplus(-fake):mean() end))
for step in judge:batches() do
  local j, m = judge:step(), maker:step()
  if dt.rank() == 0 and step % 10 == 0 then print(("%d  judge %.4f  maker %.4f"):format(step, j.loss, m.loss)) end
end
