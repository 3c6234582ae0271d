-- A model of many layers, for the time that planning takes:  dtrain plan tests/bench/deep.lua --layers 256 --ranks 8
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args {
  layers = 128,
  pipeline = { default = 1, help = "stages" },
  squares = { default = 0, help = "instead of a GPT a product m = m * m + m so many times" },
}

local Squares = nn.module "Squares"
function Squares:init() self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8) end
function Squares:forward(x)
  local m = self.first(x)
  for _ = 1, args.squares do m = m * m + m end
  return self.last(m)
end

local gpt = args.squares == 0
return dt.job {
  model = gpt and nn.GPT { vocab = 64, layers = args.layers, heads = 2, width = 32, context = 16 } or Squares(),
  loss = gpt and nn.CrossEntropy() or nn.MSE(),
  data = gpt and data.synthetic { tokens = 64, context = 16, samples = 256 }
    or data.synthetic { inputs = { 8 }, targets = { 8 }, samples = 256 },
  batch = { global = 64, micro = 2 }, optimizer = optim.AdamW { lr = 1e-3 }, steps = 1, parallel = { pipeline = args.pipeline },
}
