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

-- Initial values on concrete tensors, for whoever looks at a module before a job trains it: those that a job of this seed would begin
-- with, were the outermost module that p belongs to by now its model.
local function draw(p, seed, name)
  local i = p.init
  if i[1] == "uniform" or i[1] == "normal" then return core.draw(i, p.shape, seed, name) end
  return core.full(p.shape, i[1] == "const" and i[2] or i[1] == "ones" and 1.0 or 0.0)
end

-- The path of p in that module; a parameter of none has a name by its place among all.
local function name_of(p)
  local name = p.up and P.path(p.up, p)
  return name or ("parameter %d"):format(p.seed)
end

--- The concrete value: from the engine that trains it, as given, or freshly made.
function Parameter:concrete()
  if self.engine then return self.engine:fetch(self) end
  if not self.data then
    if core.is_tensor(self.init) then
      self.data = self.init
    else
      self.drawn = { scope.seed or cli.peek("seed", "integer") or 0, name_of(self) }
      self.data = draw(self, self.drawn[1], self.drawn[2])
    end
  end
  return self.data
end

-- Whether the value is only what `draw` made for somebody to look at, with nothing written into it since.
local function untouched(p)
  return p.drawn and core.same(p.data, draw(p, p.drawn[1], p.drawn[2]))
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

--- What a graph begins with, in which p has this name: the value that the user gave, else the way to make one. Where the graph
--- computes with concrete values (dt.value_and_grad) the concrete value.
function Parameter:initial(name)
  if scope.current and scope.current.concrete then return self:concrete() end
  if not self.data then return self.init end
  if untouched(self) then
    local random = self.init[1] == "uniform" or self.init[1] == "normal"
    if random and (self.drawn[1] ~= core.seed() or self.drawn[2] ~= name) then scope.redrawn = name end
    self.data, self.drawn = nil, nil
    return self.init
  end
  return self.data
end

return P
