-- Two engines on one model, one after the other in each round, with checkpoints of each: tests/lua/shared_spec.lua runs it.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local args = dt.args { dir = { default = "" }, report = { default = "" } }

local Pair = nn.module "Pair"
function Pair:init()
  self.first = nn.Sequential { nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4) }
  self.second = nn.Linear(4, 2)
end
function Pair:forward(x) return self.second(dt.tanh(self.first(x))) end
local pair = Pair()
local set = data.synthetic { inputs = { 3 }, targets = { 2 }, samples = 48 }
local function engine(name, freeze, optimizer)
  return dt.engine(dt.job { model = pair, loss = nn.MSE(), freeze = freeze, data = set, batch = { global = 12, micro = 3 }, steps = 10,
    optimizer = optimizer, clip = 0.5, parallel = { data = "auto" },
    checkpoint = { dir = ("%s/%s"):format(args.dir, name) } })
end
local one = engine("one", pair.second, optim.Adam { lr = 0.02 })
local two = engine("two", nil, optim.SGD { lr = 0.1, momentum = 0.9 })
for _, batch in one:batches() do
  one:step(batch)
  two:step()
end
one:save()
two:save()
if args.report ~= "" then
  local state = two:state()
  if dt.rank() == 0 then dt.save(args.report, state) end
end
