-- CLIP's contrastive loss (Radford et al. 2021) on replicas: each has its own pairs and compares them with those of
-- all, which it gathers; gradients flow back through the gather. The result is that of one process with the whole
-- batch.
--   mpirun -n 2 dtrain examples/strategies/clip_contrastive.lua
--   dtrain explain examples/strategies/clip_contrastive.lua --ranks 2    look at: all_gather forward, reduce_scatter backward
local dt = require "dtrain"
local nn = dt.nn
local Clip = nn.module "Clip"
function Clip:init() self.image, self.text = nn.Linear(32, 16), nn.Linear(24, 16) end
function Clip:forward(x)
  local function unit(y) return y / y:norm { dims = { 1 }, keepdim = true } end
  local image, text = unit(self.image(x:slice { dim = 1, stop = 32 })), unit(self.text(x:slice { dim = 1, start = 32 }))
  local mine = (image * text):sum { 1 } * 10 -- a pair's own similarity
  local function against(y, all) return (y:matmul(all:all_gather "data", { tb = true }) * 10):logsumexp(1) end
  return against(image, text) + against(text, image) - 2 * mine
end

return dt.job { model = Clip(), loss = function(each) return each:mean() / 2 end,
  data = dt.data.synthetic { inputs = { 56 }, targets = { 1 }, samples = 256 }, batch = 32,
  optimizer = dt.optim.AdamW { lr = 1e-3 }, steps = 20 }
