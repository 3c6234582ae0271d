-- A model of one's own: modules with init and forward, any tensor operation in between. Here residual blocks with a
-- gate (Dauphin et al. 2017) that tell clouds of points apart.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { width = 64, blocks = 3, epochs = 5 }

local Gated = nn.module("Gated")

function Gated:init(width)
  self.norm = nn.LayerNorm(width)
  self.up = nn.Linear(width, 2 * width)
  self.down = nn.Linear(width, width)
  self.scale = nn.parameter({ width }, nn.init.constant(0.5)) -- a parameter of one's own
end

function Gated:forward(x)
  local value, gate = dt.chunk(self.up(self.norm(x)), 2, -1)
  return x + self.down(value * dt.sigmoid(gate)) * self.scale
end

local Net = nn.module("Net")

function Net:init(c)
  self.enter = nn.Linear(c.inputs, c.width)
  self.blocks = {}
  for i = 1, c.blocks do self.blocks[i] = Gated(c.width) end
  self.leave = nn.Linear(c.width, c.classes)
end

function Net:forward(x)
  x = self.enter(x)
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.leave(x)
end

local model = Net { inputs = 20, width = args.width, blocks = args.blocks, classes = 8 }
if dt.rank() == 0 then print(model) end

return dt.job {
  model     = model,
  loss      = nn.CrossEntropy { label_smoothing = 0.05 },
  data      = data.synthetic { inputs = { 20 }, classes = 8, samples = 5000 }:split { train = 0.8, valid = 0.2 },
  batch     = 64,
  optimizer = optim.AdamW { lr = 1e-3, no_decay = true },
  schedule  = optim.cosine {},
  epochs    = args.epochs,
  eval      = { metrics = { "accuracy" } },
}
