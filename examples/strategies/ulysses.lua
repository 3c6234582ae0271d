-- Sequences divided over an axis, and heads inside attention (DeepSpeed-Ulysses, Jacobs et al. 2023). nn.GPT knows nothing of it:
-- values are placed, and a change of placement is an all-to-all: three into attention and one out, in each direction.
--   dtrain explain examples/strategies/ulysses.lua --ranks 2   and   dtrain plan, look at: activations
local dt = require "dtrain"
local ulysses = { name = "ulysses", options = { { "context", "count", dt.size() } } }
function ulysses.axes(p) return { { name = "context", size = p.context } } end
function ulysses.place(g)
  for _, name in ipairs { "inputs", "targets" } do g:place(name, { context = "S(1)" }) end
  for _, n in ipairs(g:nodes()) do if n.op == "attention" then g:place_inputs(n, { context = "S(2)" }); g:place(n, { context = "S(1)" }) end end
end
return dt.job { model = dt.nn.GPT { vocab = 64, layers = 2, heads = 8, width = 64, context = 32 }, loss = dt.nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 64, context = 32, samples = 64 }, batch = 8, optimizer = dt.optim.AdamW { lr = 1e-3 }, steps = 10,
  parallel = { strategies = { ulysses } } }
