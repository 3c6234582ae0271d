-- A parameter or buffer: a shape and a way to begin, until something gives it a value. In a trace it stands for the
-- graph's symbol; elsewhere for a concrete tensor, made at first use, given by the user, or read from a running engine.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local Parameter = { __name = "parameter" }
Parameter.__index = Parameter

local function new(kind, shape, init)
  for _, d in ipairs(type(shape) == "table" and shape or {}) do
    if math.type(d) ~= "integer" or d < 0 then
      util.fail("a %s's shape is a list of whole numbers, got %s", kind, util.show(shape))
    end
  end
  if type(shape) ~= "table" then util.fail("a %s's shape is a list such as {10, 5}, got %s", kind, util.show(shape)) end
  scope.made = scope.made + 1
  return setmetatable({ type = kind, shape = shape, init = init or { "zeros" }, trainable = kind == "param",
    seed = scope.made, where = util.frame() }, Parameter)
end

local P = {}

--- nn.parameter(shape, init): a trainable tensor of a module. init: see nn.init; default zeros.
function P.parameter(shape, init) return new("param", shape, init) end
--- nn.buffer(shape, init): kept and saved like a parameter, never trained; nn.assign changes it.
function P.buffer(shape, init) return new("buffer", shape, init) end
--- Where parameters of a module lie on the mesh: { weight = { tensor = "S(0)" } } (nn.Linear { ..., place = }); what is
--- not said is derived.
function P.place(module, where)
  if where == nil then return end
  local params = rawget(module, "_params")
  for name, axes in util.sorted(util.check("place", where, "table")) do
    if not params[name] then
      util.fail("place: there is no parameter '%s'; %s", tostring(name), util.suggest(tostring(name), util.keys(params)))
    end
    params[name].place = util.check("place: " .. name, axes, "table")
  end
end

function P.is(x) return getmetatable(x) == Parameter end

function Parameter:numel()
  local n = 1
  for _, d in ipairs(self.shape) do n = n * d end
  return n
end

-- Initial values on concrete tensors, for whoever looks at a module before a job trains it. A job's executor makes its own by
-- (seed, name), whatever was looked at; both draw from the same families.
local makers = {
  zeros = function(shape) return core.zeros(shape) end,
  ones = function(shape) return core.ones(shape) end,
  const = function(shape, _, v) return core.full(shape, v) end,
  uniform = function(shape, seed, a, b) return core.rand(shape, seed) * (b - a) + a end,
  normal = function(shape, seed, mean, std) return core.randn(shape, seed) * std + mean end,
}

local function draw(p, seed)
  local i = p.init
  return makers[i[1]](p.shape, seed * 1000003 + p.seed, i[2], i[3])
end

--- The concrete value: from the engine that trains it, as given, or freshly made.
function Parameter:concrete()
  if self.engine then return self.engine:fetch(self) end
  if not self.data then
    if core.is_tensor(self.init) then
      self.data = self.init
    else
      self.drawn = scope.seed or cli.peek("seed", "integer") or 0
      self.data = draw(self, self.drawn)
    end
  end
  return self.data
end

-- Whether the value is only what `draw` made for somebody to look at, with nothing written into it since.
local function untouched(p)
  if not p.drawn or p.version then return false end
  return core.same(p.data, draw(p, p.drawn))
end

--- What `self.weight` means in a forward: a symbol in a trace, else the concrete tensor.
function Parameter:value()
  local s = scope.current
  if not s then return self:concrete() end
  local symbol = s.symbols[self]
  if not symbol then
    util.fail("a parameter of shape %s is used but is no part of %s; keep its module in a field of the model",
      util.show(self.shape), s.label or "the model")
  end
  return symbol
end

--- Gives a concrete value (copied by reference); the shape must agree.
function Parameter:set(tensor, name)
  local shape = tensor:shape()
  local same = #shape == #self.shape
  for i = 1, #shape do same = same and shape[i] == self.shape[i] end
  if not same then
    util.fail("%s has shape %s, the given tensor %s; they must be equal", name or "the parameter",
      util.show(self.shape), util.show(shape))
  end
  self.drawn = nil
  if self.engine then self.engine:store(self, tensor) else self.data = tensor end
end

--- What a graph begins with: the value that the user gave, else the way to make one. Where the graph computes with concrete values
--- (dt.value_and_grad) the concrete value.
function Parameter:initial()
  if scope.current and scope.current.concrete then return self:concrete() end
  if not self.data then return self.init end
  if untouched(self) then
    self.data, self.drawn = nil, nil
    return self.init
  end
  return self.data
end

return P
