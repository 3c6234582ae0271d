-- Experts over an axis (GShard, Lepikhin et al. 2021): tokens are divided by samples, weights by experts; what goes to the experts
-- and what comes back changes its placement, one all-to-all each. The tokens that are dropped are those of one process.
--   dtrain explain examples/strategies/moe.lua --ranks 4     look at: all_to_all over experts, two forward, two backward
local dt = require "dtrain"
local nn = dt.nn
local experts = { name = "experts", axes = function() return { { name = "experts", size = "auto" } } end }
function experts.place(g)
  for _, name in ipairs { "inputs", "targets" } do g:place(name, { experts = "S(0)" }) end
  for _, q in ipairs(g:params()) do if q.name:find "moe%.[ud]" then g:place(q.name, { experts = "S(0)" }) end end
  local nodes = g:nodes()
  for _, n in ipairs(nodes) do
    local w = n.op == "matmul" and nodes[n.inputs[2]].name or ""
    if w:find "moe%.up" then g:replace(n, function(x, up) return x:place { experts = "S(0)" }:matmul(up) end) end
    if w:find "moe%.down" then g:replace(n, function(x, down) return x:matmul(down):place { experts = "S(1)" } end) end
  end
end
local Net = nn.module "Net"
function Net:init()
  self.embed, self.moe, self.out = nn.Embedding(64, 32), nn.MoE { width = 32, experts = 8, top_k = 2 }, nn.Linear(32, 64)
end
function Net:forward(x)
  local y, balance = self.moe(self.embed(x))
  return { self.out(y), balance }
end
return dt.job { model = Net(), loss = function(y, t) return nn.cross_entropy(y[1], t) + 0.01 * y[2] end, batch = 8, steps = 20,
  data = dt.data.synthetic { tokens = 64, context = 16, samples = 64 }, optimizer = dt.optim.SGD { lr = 0.1 },
  parallel = { strategies = { experts } } }
