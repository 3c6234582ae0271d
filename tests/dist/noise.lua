-- A model whose forward draws noise: what any number of ranks must agree on (tests/lua/numbers_spec.lua).
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local args = dt.args { precision = "f32", micro = 8, tensor = 1 }
local Net = nn.module("Net")
function Net:init() self.a, self.b = nn.Linear(10, 16), nn.Linear(16, 5) end
function Net:forward(x)
  local h = self.a(x)
  h = h + dt.randn(h:shape()) * 0.5
  h = h * (dt.rand({ 16 }, { samples = false }) + 0.5)
  return self.b(dt.tanh(h)) + dt.randint(0, 3, { x:size(0), 1 }):to "f32"
end
local job = dt.job { model = Net(), loss = nn.MSE(), data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100 },
  batch = { global = 8, micro = args.micro }, optimizer = optim.SGD { lr = 0.05 }, steps = 6, precision = args.precision,
  parallel = { tensor = args.tensor } }
local e = dt.engine(job)
for _, b in e:batches() do local m = e:step(b) if dt.rank() == 0 then print(("loss %.6f"):format(m.loss)) end end
