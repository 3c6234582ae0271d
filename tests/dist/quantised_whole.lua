-- The weights of examples/strategies/quantised_gather.lua by another way: shares are gathered in f32, and each is then rounded to
-- 8 bits where it has arrived. It sends four times the bytes, and must give the same:
--   dtrain check examples/strategies/quantised_gather.lua --ranks n --reference tests/dist/quantised_whole.lua
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local block = 256

local function gather(share, info)
  local n = share:numel()
  local all = share:all_gather("data"):reshape { info.ranks, n }
  local x = dt.pad(all, { before = { 0, 0 }, after = { 0, -n % block } }):reshape { -1, block }
  local scale = dt.maximum(dt.abs(x):max { dims = { 1 }, keepdim = true } / 127, 1e-30)
  local rounded = (dt.floor(x / scale + 128.5) - 128) * scale
  return rounded:reshape({ info.ranks, -1 }):slice { dim = 1, start = 0, stop = n }:reshape { -1 }
end

return dt.job { model = nn.GPT { vocab = 64, layers = 4, heads = 4, width = 64, context = 32 }, loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 64, context = 32, samples = 256 }, batch = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 }, steps = 20,
  parallel = { zero = 3, resident = 0, strategies = { { name = "quantised", gather = gather } } } }
