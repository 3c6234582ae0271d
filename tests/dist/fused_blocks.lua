-- 300 blocks whose q, k and v are one product, each of its own width: more cuts by segments than fit into a byte.
local dt = require "dtrain"
local nn = dt.nn

local args = dt.args { blocks = 300 }

local Block = nn.module "Block"
function Block:init(width)
  self.width = width
  self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 3 * width, { bias = false }), nn.Linear(width, 8, { bias = false })
end
function Block:forward(x)
  local q, k, v = self.qkv(self.norm(x)):split({ self.width, self.width, self.width }, 1)
  return x + self.out(q * k + v) / 20
end

local blocks = {}
for i = 1, args.blocks do blocks[i] = Block(2 * i) end

return dt.job {
  model = nn.Sequential(blocks), loss = nn.MSE(), data = dt.data.synthetic { inputs = { 8 }, targets = { 8 }, samples = 32 },
  batch = 8, optimizer = dt.optim.SGD { lr = 0.01 }, steps = 2, parallel = { tensor = 2 },
}
