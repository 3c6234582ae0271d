-- The optimizers that a DeepSpeed configuration may name, with DeepSpeed's defaults.
local adam = require "dtrain.optim.adam"
local define = require "dtrain.optim.define".define
local ops = require "dtrain.ops"
local util = require "dtrain.util"

local number, flag = { "nonnegative" }, { "boolean" }
local no_norm = { "number", refuse = "is DeepSpeed's old place; write \"gradient_clipping\" at the top", is = 0 }

-- LAMB as DeepSpeed's: the ratio is kept between min_coeff and max_coeff.
local Lamb = define {
  name = "Lamb",
  defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0, max_coeff = 10, min_coeff = 0.01 },
  kinds = { betas = "decay", eps = "nonnegative", weight_decay = "nonnegative", max_coeff = "nonnegative", min_coeff = "nonnegative" },
  state = { "m", "v" },
  update = function(p, g, s, h)
    local b1, b2 = h.betas[1], h.betas[2]
    s.m = s.m * b1 + g * (1 - b1)
    s.v = s.v * b2 + ops.square(g) * (1 - b2)
    local direction = s.m / (1 - b1 ^ h.t) / (ops.sqrt(s.v / (1 - b2 ^ h.t)) + h.eps)
    if h.weight_decay ~= 0 then direction = direction + p * h.weight_decay end
    local size, length = ops.norm(p), ops.norm(direction)
    local usable = ops.gt(ops.minimum(size, length), 0)
    local ratio = size / ops.where(usable, length, 1)
    ratio = ops.maximum(ops.minimum(ratio, h.max_coeff), h.min_coeff)
    return p - direction * (ops.where(usable, ratio, 1) * h.lr)
  end,
}

local function with(more)
  local rows = { lr = number, weight_decay = number }
  for key, row in util.sorted(more) do rows[key] = row end
  return rows
end

local adam_rows = with { betas = { "table" }, eps = number, amsgrad = flag, torch_adam = flag, adam_w_mode = flag,
  bias_correction = { "boolean", refuse = "Adam without bias correction isn't there; optim.define writes one", is = true },
  eps_inside_sqrt = { "boolean", refuse = "eps stands outside of the root; leave it out", is = false },
  max_grad_norm = no_norm }

-- Adam means AdamW unless adam_w_mode is false; only torch's own has a decay of 0.01 by default.
local function adam_of(o, forced)
  local decoupled = forced or o.adam_w_mode ~= false
  o.weight_decay = o.weight_decay or (decoupled and o.torch_adam and 0.01) or 0
  o.torch_adam, o.adam_w_mode = nil, nil
  return (decoupled and adam.AdamW or adam.Adam)(o)
end

local known = {
  adam = { adam_rows, function(o) return adam_of(o, false) end },
  adamw = { adam_rows, function(o) return adam_of(o, true) end },
  sgd = { with { momentum = number, dampening = number, nesterov = flag }, require "dtrain.optim.sgd" },
  lamb = { with { betas = { "table" }, eps = number, max_coeff = number, min_coeff = number, max_grad_norm = no_norm,
    bias_correction = adam_rows.bias_correction, eps_inside_sqrt = adam_rows.eps_inside_sqrt }, Lamb },
  lion = { with { betas = { "table" } }, require "dtrain.optim.lion" },
  adagrad = { with { eps = number, lr_decay = number, initial_accumulator_value = number }, require "dtrain.optim.adagrad" },
  rmsprop = { with { alpha = number, eps = number, momentum = number, centered = flag }, require "dtrain.optim.rmsprop" },
}
local names = { "Adam", "AdamW", "SGD", "Lamb", "Lion", "Adagrad", "RMSprop" }

local compressed = "compresses gradients; write the plain optimizer, and a hook in parallel = { gradient = { hook = } }"
local refused = { onebitadam = compressed, onebitlamb = compressed, zerooneadam = compressed,
  muon = "isn't there; optim.define writes it", muadam = "isn't there; Adam with groups of its own lr is the same",
  muadamw = "isn't there; AdamW with groups of its own lr is the same", musgd = "isn't there; SGD with groups is the same" }

--- The optimizer that an `optimizer` object names.
return function(reader, section)
  local s = reader:object("optimizer", section, { type = { "string" }, params = { "object" },
    legacy_fusion = { "boolean", same = "kernels are fused anyway", is = false } })
  local name = (s.type or ""):lower()
  if refused[name] then reader:fail("optimizer.type", "%s %s", s.type, refused[name]) end
  if not known[name] then
    reader:fail("optimizer.type", "%s is unknown; %s", s.type or "(missing)", util.suggest(s.type or "", names))
  end
  local o = reader:object("optimizer.params", s.params or {}, known[name][1])
  if name == "sgd" or name == "lion" then o.lr = o.lr or (name == "sgd" and 1e-3 or 1e-4) end
  return known[name][2](o)
end
