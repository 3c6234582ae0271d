-- The small jobs of tests/lua/strategies_spec.lua: a GPT whose heads, width and vocabulary meet 2 and 3 parts (the vocabulary is
-- padded), and an MLP. The strategy comes with --parallel. Or many jobs, one after another: --list names a Lua file that returns
-- { { id =, model =, tied =, clip =, micro =, precision =, parallel = } ... }; each leaves id.safetensors, or id.error, beside it.
local dt = require "dtrain"
local cli = require "dtrain.cli"
local compare = require "dtrain.compare"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { model = { default = "gpt", choices = { "gpt", "mlp" } }, tied = true, clip = 0.0, micro = 24, list = "",
  precision = { default = "f32", choices = { "f32", "bf16", "f16" } } }
local layers = 4

local Block = nn.module "Block"
function Block:init(width)
  self.norm = nn.LayerNorm(width)
  self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
end
function Block:forward(x) return x + self.down(dt.gelu(self.up(self.norm(x)))) end

local models = {
  mlp = function()
    local list = { nn.Linear(10, 24) }
    for _ = 1, layers do list[#list + 1] = Block(24) end
    list[#list + 1] = nn.Linear(24, 7)
    return nn.Sequential(list), data.synthetic { inputs = { 10 }, classes = 7, samples = 60 }
  end,
  gpt = function(o)
    return nn.GPT { vocab = 50, layers = layers, heads = 6, width = 36, context = 12, tied = o.tied },
      data.synthetic { tokens = 50, context = 12, samples = 60 }
  end,
}

local function job(o)
  local model, set = models[o.model](o)
  return (dt.job {
    model = model, loss = nn.CrossEntropy(), data = set,
    batch = { global = 24, micro = o.micro }, optimizer = optim.AdamW { lr = 1e-3, weight_decay = 0.1, no_decay = true },
    clip = o.clip > 0 and o.clip or nil, precision = o.precision, steps = 3,
    parallel = { gradient = { bucket_mb = 0.02, first_bucket_mb = 0.01 } },
  })
end

if args.list == "" then return (job(args)) end

local folder = args.list:match "^(.*)/"
for _, o in ipairs(dofile(args.list)) do
  local run
  local ok, message = pcall(function()
    cli.given.parallel = o.parallel
    local engine = dt.engine(job(o))
    run = compare.record(engine, 2)
    engine.exec:close()
  end)
  if dt.rank() == 0 then
    if ok then
      dt.save(("%s/%s.safetensors"):format(folder, o.id), run)
    else
      local file <close> = assert(io.open(("%s/%s.error"):format(folder, o.id), "w"))
      file:write(message)
    end
  end
end
