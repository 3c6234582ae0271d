-- Sequences divided over an axis, and heads inside of attention (DeepSpeed-Ulysses, Jacobs et al. 2023). nn.GPT knows nothing of
-- it: a change of placement is an all-to-all, three into attention and one out. See `explain` and `plan --ranks 4`.
local dt = require "dtrain"
local ulysses = { name = "ulysses", axes = function() return { { name = "context", size = "auto" } } end }
function ulysses.place(g)
  for _, name in ipairs { "inputs", "targets" } do g:place(name, { context = "S(1)" }) end
  local function heads(x) return x:place { context = "S(2)" } end
  local function attend(q, k, v, n) return dt.attention(heads(q), heads(k), heads(v), n.attrs):place { context = "S(1)" } end
  for _, n in ipairs(g:nodes()) do if n.op == "attention" then g:replace(n, attend) end end
end
return dt.job { model = dt.nn.GPT { vocab = 64, layers = 2, heads = 8, width = 64, context = 32 }, loss = dt.nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 64, context = 32, samples = 64 }, batch = 8, optimizer = dt.optim.SGD { lr = 0.1 },
  steps = 10, parallel = { strategies = { ulysses } } }
