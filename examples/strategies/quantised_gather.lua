-- ZeRO-3 whose gathers travel in 8 bits (ZeRO++, Wang et al. 2023): a share becomes bytes with one scale for every 256
-- elements. A quarter of the bytes of f32 travels; weights in forward and backward are off by up to 1/254 of their
-- block's largest, so losses are near those of full gathers and not equal to them.
--   mpirun -n 2 dtrain examples/strategies/quantised_gather.lua
--   dtrain explain examples/strategies/quantised_gather.lua --ranks 4    look at: all_gather of u8 instead of f32
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local block = 256

local function gather(share, info)
  local n = share:numel()
  local x = dt.pad(share, { before = { 0 }, after = { -n % block } }):reshape { -1, block }
  local scale = dt.maximum(dt.abs(x):max { dims = { 1 }, keepdim = true } / 127, 1e-30)
  local bytes = (x / scale + 128.5):to "u8":reshape { -1 }:all_gather "data"
  local scales = scale:reshape { -1 }:all_gather "data"
  local whole = (bytes:reshape { -1, block }:to "f32" - 128) * scales:reshape { -1, 1 }
  local padded = whole:numel() // info.ranks
  return whole:reshape { info.ranks, padded }:slice { dim = 1, start = 0, stop = n }:reshape { -1 }
end

return dt.job {
  model = nn.GPT { vocab = 64, layers = 4, heads = 4, width = 64, context = 32 },
  loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 64, context = 32, samples = 256 },
  batch = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 },
  steps = 20,
  parallel = { zero = 3, resident = 0, strategies = { { name = "quantised", gather = gather } } },
}
