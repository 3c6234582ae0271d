-- Ring attention (Liu et al. 2023) with balanced causal halves (Brandon et al. 2023): of 2n parts of a sequence rank r has the parts
-- r and 2n - 1 - r. Keys and values go round; in each step each rank multiplies as much as the others. nn.GPT knows nothing of it.
--   dtrain explain examples/strategies/ring_attention.lua --ranks 4     look at: shift over ring, n - 1 a layer each way
local dt = require "dtrain"
local ring = { name = "ring", axes = function() return { { name = "ring", size = "auto" } } end }
local function here(x) return x:place { ring = "S(1)" } end

local function dealt(x, d, n) -- the parts of dim d in the order in which they lie on the ranks
  local size, out = x:size(d) // (2 * n), {}
  for i = 0, 2 * n - 1 do
    local part = i % 2 == 0 and i // 2 or 2 * n - 1 - i // 2
    out[i + 1] = x:slice { dim = d, start = part * size, stop = (part + 1) * size }
  end
  return dt.concat(out, d)
end

local function join(a, b) -- results over different keys, each weighed by its sum of exponentials
  local most = dt.maximum(a.lse, b.lse):detach()
  local wa, wb = dt.exp(a.lse - most), dt.exp(b.lse - most)
  local function share(x, w) return x.o * (w / (wa + wb)):permute({ 0, 2, 1 }):unsqueeze(3):to(x.o:dtype()) end
  return { o = share(a, wa) + share(b, wb), lse = most + dt.log(wa + wb) }
end

local function over(q, kv, causal)
  local k, v = dt.split(kv, kv:size(3) // 2, 3)
  local r = table.pack(dt.attention(q, k, v, { causal = causal, bthd = true, lse = true }))
  return { o = r[1], lse = r[2] }
end

local function attend(n, q, k, v)
  local b, t, heads, size = table.unpack(q:shape())
  local function rows(x) return x:reshape({ b, n, t // n, -1, x:size(3) }):permute({ 1, 0, 2, 3, 4 }):flatten(0, 1) end
  local function halves(x) return dt.split(x, t // (2 * n), 1) end
  local kv, lo, hi = rows(dt.concat({ here(k), here(v) }, 3)), halves(rows(here(q)))
  local first, second = over(lo, (halves(kv)), true), over(hi, kv, true)
  for step = 1, n - 1 do -- what came from before: its first part is for both halves; from behind: both are for the second half
    kv = kv:shift { axis = "ring", by = 1 }
    local k1, k2 = halves(kv)
    local early = dt.arange(n):ge(step):reshape({ n, 1 }):broadcast_to({ n, b }):reshape { n * b, 1, 1, 1 }
    local r = over(dt.where(early, lo, hi), dt.where(early, k1, k2))
    local function where(is) return { o = r.o, lse = dt.where(early:reshape({ n * b, 1, 1 }):eq(is), r.lse, -1e30) } end
    first, second = join(first, where(true)), join(join(second, over(hi, k1)), where(false))
  end
  local o = dt.concat({ first.o, second.o }, 1):reshape { n, b, -1, heads, size }
  return o:permute({ 1, 0, 2, 3, 4 }):reshape { b, t, heads, size }
end

function ring.rewrite(g, _, mesh)
  local n, nodes = 1, g:nodes()
  for _, axis in ipairs(mesh) do n = axis.name == "ring" and axis.size or n end
  for _, x in ipairs(nodes) do
    if x.op == "attention" then g:replace(x, function(...) return attend(n, ...) end) end
    if x.op == "embedding" then g:replace(x, function(ids, w) return dt.embedding(here(dealt(ids, 1, n)), w) end) end
    if x.op == "cross_entropy" then g:replace(x, function(y, to) return dt.cross_entropy(y, here(dealt(to, 1, n)), x.attrs) end) end
    if x.op == "add" and nodes[x.inputs[2]].op == "param" then g:replace(x, function(y, w) return y + dealt(w, 0, n) end) end
  end
end
return dt.job { model = dt.nn.GPT { vocab = 64, layers = 2, heads = 4, width = 64, context = 32 }, loss = dt.nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 64, context = 32, samples = 64 }, batch = 8, optimizer = dt.optim.SGD { lr = 0.1 },
  steps = 10, parallel = { strategies = { ring } } }
