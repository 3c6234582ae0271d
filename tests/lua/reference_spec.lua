-- Every op and loss against PyTorch's values and gradients (tests/data/ops.safetensors, made by make_ops.py in f64, stored in
-- f32). A case is the inputs' names and a function of them; the file's own list of cases must be covered.
local dt = require "dtrain"
local nn = dt.nn
local t = dt.load "tests/data/ops.safetensors"

local function x1(f) return { "x", f } end
local cases = {
  linear = { "x", "w", "b", function(x, w, b) return dt.linear(x, w, b, { bias = true }) end },
  matmul_batched = { "a", "b", function(a, b) return dt.matmul(a, b) end },
  conv = { "x", "w", "b", function(x, w, b) return dt.conv2d(x, w, b) end },
  conv_stride2_pad1 = { "x", "w", "b", function(x, w, b) return dt.conv2d(x, w, b, { stride = 2, padding = 1 }) end },
  conv_dil2 = { "x", "w", "b", function(x, w, b) return dt.conv2d(x, w, b, { dilation = 2 }) end },
  conv_groups2 = { "x", "w", "b", function(x, w, b) return dt.conv2d(x, w, b, { groups = 2, padding = 1 }) end },
  conv_rect = { "x", "w", "b", function(x, w, b)
    return dt.conv2d(x, w, b, { stride = { 1, 2 }, padding = { 2, 0 } })
  end },
  maxpool = x1(function(x) return dt.max_pool2d(x, { kernel = 2 }) end),
  maxpool_3s2p1 = x1(function(x) return dt.max_pool2d(x, { kernel = 3, stride = 2, padding = 1 }) end),
  avgpool = x1(function(x) return dt.avg_pool2d(x, { kernel = 2 }) end),
  adaptive_avg = x1(function(x) return dt.adaptive_avg_pool2d(x, 1) end),
  layer_norm = { "x", "w", "b", function(x, w, b) return dt.layer_norm(x, w, b, { eps = 1e-5 }) end },
  rms_norm = { "x", "w", function(x, w) return dt.rms_norm(x, w, { eps = 1e-6 }) end },
  batch_norm_train = { "x", "w", "b", function(x, w, b)
    local y = dt.batch_norm(x, w, b, dt.zeros({ 3 }), dt.ones({ 3 }), { training = true, eps = 1e-5 })
    return y
  end },
  group_norm = { "x", "w", "b", function(x, w, b) return dt.group_norm(x, 2, w, b, 1e-5) end },
  embedding = { "ids", "w", function(ids, w) return dt.embedding(ids, w) end },
  relu = x1(dt.relu), gelu = x1(dt.gelu), silu = x1(dt.silu), softplus = x1(dt.softplus), tanh = x1(dt.tanh),
  sigmoid = x1(dt.sigmoid), erf = x1(dt.erf), leaky_relu = x1(dt.leaky_relu), elu = x1(dt.elu),
  hardswish = x1(dt.hardswish), mish = x1(dt.mish), gelu_tanh = x1(dt.gelu_tanh),
  softmax = x1(function(x) return dt.softmax(x, -1) end),
  softmax_dim1 = x1(function(x) return dt.softmax(x, 1) end),
  log_softmax = x1(function(x) return dt.log_softmax(x, -1) end),
  cumsum = x1(function(x) return dt.cumsum(x, 1) end),
  logsumexp = x1(function(x) return dt.logsumexp(x, -1) end),
  var = x1(function(x) return dt.var(x, -1, { correction = 0 }) end),
  max_dim = x1(function(x) return dt.max(x, { 1 }) end),
  sdpa = { "q", "k", "v", function(q, k, v) return dt.attention(q, k, v) end },
  sdpa_causal = { "q", "k", "v", function(q, k, v) return dt.attention(q, k, v, { causal = true }) end },
  sdpa_gqa = { "q", "k", "v", function(q, k, v) return dt.attention(q, k, v, { causal = true }) end },
  sdpa_cross = { "q", "k", "v", function(q, k, v) return dt.attention(q, k, v) end },
  cross_entropy = { "x", "t", function(x, y) return (nn.cross_entropy(x, y)) end },
  cross_entropy_ignore_smooth = { "x", "t", function(x, y)
    return (nn.cross_entropy(x, y, { ignore_index = -100, label_smoothing = 0.1 }))
  end },
  mse = { "x", "y", nn.mse }, l1 = { "x", "y", nn.l1 }, huber = { "x", "y", nn.huber },
  smooth_l1 = { "x", "y", nn.smooth_l1 },
  bce_logits = { "x", "y", nn.bce_with_logits },
  rotary_half = x1(function(x) return dt.rotary(x, { theta = 10000 }) end),
}

-- The names in the file, in order.
local names, seen = {}, {}
for key in dt.sorted(t) do
  local name = key:match "^(.-)%.in%."
  if name and not seen[name] then
    seen[name] = true
    names[#names + 1] = name
  end
end

local recurrent = { lstm = true, gru = true }

describe("ops against PyTorch", function()
  for _, name in ipairs(names) do
    if not recurrent[name] then
      it(name, function()
        local case = assert(cases[name], "no case for " .. name)
        local arg, f, inputs, learn = {}, case[#case], {}, {}
        for i = 1, #case - 1 do
          arg[i] = case[i]
          inputs[arg[i]] = t[name .. ".in." .. arg[i]]
          if t[name .. ".grad." .. arg[i]] then learn[arg[i]] = inputs[arg[i]] end
        end
        local function apply(get)
          local v = {}
          for i = 1, #arg do v[i] = get(arg[i]) end
          return f(table.unpack(v))
        end
        local close = { rtol = 2e-5, atol = 2e-5 }
        assert.is_true(dt.allclose(apply(function(k) return inputs[k] end), t[name .. ".out.0"], close), "value")
                local _, grads = dt.value_and_grad(function(m)
          return (apply(function(k) return m[k] or inputs[k] end) * t[name .. ".gout.0"]):sum()
        end, learn)
        for key in dt.sorted(learn) do
          assert.is_true(dt.allclose(grads[key], t[name .. ".grad." .. key], close), "gradient of " .. key)
        end
      end)
    end
  end
end)
