-- The small jobs of tests/lua/strategies_spec.lua: a GPT whose heads, width and vocabulary meet 2 and 3 parts (the vocabulary is
-- padded), and an MLP. The strategy comes with --parallel.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { model = { default = "gpt", choices = { "gpt", "mlp" } }, tied = true, clip = 0.0, micro = 24, layers = 4,
  precision = { default = "f32", choices = { "f32", "bf16", "f16" } } }

local Block = nn.module "Block"
function Block:init(width)
  self.norm = nn.LayerNorm(width)
  self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
end
function Block:forward(x) return x + self.down(dt.gelu(self.up(self.norm(x)))) end

local function mlp()
  local list = { nn.Linear(10, 24) }
  for _ = 1, args.layers do list[#list + 1] = Block(24) end
  list[#list + 1] = nn.Linear(24, 7)
  return nn.Sequential(list), data.synthetic { inputs = { 10 }, classes = 7, samples = 60 }
end
local function gpt()
  return nn.GPT { vocab = 50, layers = args.layers, heads = 6, width = 36, context = 12, tied = args.tied },
    data.synthetic { tokens = 50, context = 12, samples = 60 }
end

local model, set = ({ gpt = gpt, mlp = mlp })[args.model]()

return dt.job {
  model = model, loss = nn.CrossEntropy(), data = set,
  batch = { global = 24, micro = args.micro }, optimizer = optim.AdamW { lr = 1e-3, weight_decay = 0.1, no_decay = true },
  clip = args.clip > 0 and args.clip or nil, precision = args.precision, steps = 3,
  parallel = { gradient = { bucket_mb = 0.02, first_bucket_mb = 0.01 } },
}
