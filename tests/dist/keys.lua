-- Attention whose keys have a bias. Softmax takes away what all keys share, so the gradient of that bias is zero, and what is computed
-- is rounding: a job for tests of `dtrain check`.
local dt = require "dtrain"
local nn = dt.nn
local A = nn.module "A"
function A:init(w)
  self.q, self.k, self.v, self.o, self.e = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, w), nn.Embedding(50, w)
end
function A:forward(x)
  x = self.e(x)
  local b, t, w = table.unpack(x:shape())
  local function heads(y) return y:reshape { b, t, 4, w // 4 }:transpose(1, 2) end
  local y = dt.attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), { causal = true })
  return self.o(y:transpose(1, 2):reshape { b, t, w }):matmul(self.e.weight:transpose(0,1))
end
return dt.job { model = A(16), loss = nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 50, context = 8, samples = 40 }, batch = { global = 8, micro = 4 },
  optimizer = dt.optim.AdamW { lr = 0.01 }, steps = 2, parallel = {} }
