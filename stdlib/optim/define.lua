-- optim.define: an optimizer is a Lua function of (parameter, gradient, state, hyperparameters) in tensor operations.
-- It is traced once for each parameter and runs as native code; it never runs in a step.
--
--   local SGD = optim.define { name = "SGD", defaults = { momentum = 0 },
--     state = function(h) return h.momentum ~= 0 and { "momentum" } or {} end,
--     update = function(p, g, s, h) ... return new_p end }
--   local opt = SGD { lr = 0.1, momentum = 0.9 }
--
-- h.lr (learning rate of this update) and h.t (its number, from 1) are symbolic f64 scalars; all else in h is what
-- the user or the defaults say. s.x reads a state and `s.x = value` writes it; what `update` returns is the new
-- parameter.
local core = require "dtrain.core"
local util = require "dtrain.util"

local Optimizer = { __name = "optimizer" }
Optimizer.__index = Optimizer

local define = {}

function define.is(x) return getmetatable(x) == Optimizer end

-- keys that every optimizer takes
local common = { "lr", "groups", "no_decay" }

local function matcher(match, where)
  if type(match) == "function" then return match end
  if type(match) == "string" then match = { match } end
  util.check("optimizer group: match", match, "table", where)
  for _, pattern in ipairs(match) do
    util.check("optimizer group: match", pattern, "string", where)
    local ok, message = pcall(string.find, "", pattern)
    if not ok then util.fail_at(where, "optimizer group: %q is no Lua pattern: %s", pattern, message) end
  end
  return function(name)
    for _, pattern in ipairs(match) do
      if name:find(pattern) then return true end
    end
    return false
  end
end

-- Checks one hyperparameter: by its kind where the definition names one (each number of a list), and against its default: the same
-- type, betas of the same length.
local function check_value(what, key, value, default, kind)
  if kind then
    for _, v in ipairs(type(value) == "table" and value or { value }) do util.check(what .. ": " .. key, v, kind) end
  end
  if default == nil then return end
  if type(value) ~= type(default) then
    util.fail("%s: %s wants a %s, got %s (%s)", what, key, type(default), util.show(value), util.kind(value))
  end
  if type(default) == "table" then
    if #value ~= #default then util.fail("%s: %s wants %d numbers, got %s", what, key, #default, util.show(value)) end
    for _, v in ipairs(value) do util.check(what .. ": " .. key, v, "number") end
  end
end

local function construct(def, given)
  local what = "optim." .. def.name
  util.check(what, given == nil and {} or given, "table")
  given = given or {}
  local known = { table.unpack(common) }
  if def.defaults then
    for _, k in ipairs(util.keys(def.defaults)) do if k ~= "lr" then known[#known + 1] = k end end
  end
  local self = setmetatable({ def = def, h = util.copy(def.defaults or {}), groups = {}, where = util.frame() },
    Optimizer)
  for key, value in util.sorted(given) do
    local is_common = key == "lr" or key == "groups" or key == "no_decay"
    if type(key) ~= "string" then util.fail("%s takes named options, got %s", what, util.show(value)) end
    if def.defaults and not is_common and def.defaults[key] == nil then
      util.fail("%s has no option '%s'; %s", what, key, util.suggest(key, known))
    end
    if not is_common then
      check_value(what, key, value, def.defaults and def.defaults[key], def.kinds[key])
      self.h[key] = value
    end
  end
  self.lr = given.lr or self.h.lr
  if self.lr == nil then util.fail("%s needs a learning rate; write %s { lr = 1e-3 }", what, what) end
  self.lr = util.check(what .. ": lr", self.lr, "nonnegative")
  self.no_decay = util.check(what .. ": no_decay", given.no_decay or false, "boolean")
  for i, g in ipairs(util.check(what .. ": groups", given.groups or {}, "table")) do
    local label = ("%s: groups[%d]"):format(what, i)
    util.check(label, g, "table")
    if g.match == nil then util.fail("%s needs match = { patterns of parameter names }", label) end
    local group = { match = matcher(g.match), said = g.match, h = {}, lr = self.lr }
    for key, value in util.sorted(g) do
      if key == "lr" then
        group.lr = util.check(label .. ": lr", value, "nonnegative")
      elseif key == "lr_scale" then
        if g.lr then util.fail("%s has both lr and lr_scale; give one", label) end
        group.lr = self.lr * util.check(label .. ": lr_scale", value, "nonnegative")
      elseif key ~= "match" then
        if def.defaults and def.defaults[key] == nil then
          util.fail("%s has no option '%s'; %s", label, tostring(key),
            util.suggest(tostring(key), { "match", "lr", "lr_scale", table.unpack(known, #common + 1) }))
        end
        check_value(label, key, value, def.defaults and def.defaults[key], def.kinds[key])
        group.h[key] = value
      end
    end
    self.groups[i] = group
    if def.check then def.check(setmetatable(group.h, { __index = self.h })) end
  end
  if def.check then def.check(self.h) end
  return self
end

--- optim.define{ name = "optimizer", state = list | function(h) -> list, defaults = { key = value }, update =
--- function(p, g, s, h) -> new p, fill = { state = number or key of h }, check = function(h), kinds = { key = kind of
--- util.check, "nonnegative", "fraction", "decay" ... } }: a constructor. Values are checked where they are given. States
--- are f32, of the parameter's shape, and begin with `fill` (0). Without `defaults` any hyperparameter is taken.
--- Every optimizer takes lr; no_decay = true (weight_decay is 0 for biases, norms and other parameters of fewer than
--- 2 dims); groups = { { match = patterns or function(name), lr = or lr_scale =, any hyperparameter }, ... }, the
--- first match counts.
function define.define(def)
  local o = util.options("optim.define", def, { { "name", "string", "optimizer" }, { "state", "table|function", {} },
    { "defaults", "table" }, { "update", "function", required = true }, { "fill", "table", {} },
      { "check", "function" }, { "kinds", "table", {} } })
  return function(given) return construct(o, given) end
end

--- Group number of a parameter: 0, or the first group that matches its name.
function Optimizer:group_of(name)
  for i, g in ipairs(self.groups) do
    if g.match(name) then return i end
  end
  return 0
end

--- Learning rates before the schedule: of group 0, 1, ...
function Optimizer:group_lr()
  local out = { self.lr }
  for i, g in ipairs(self.groups) do out[i + 1] = g.lr end
  return out
end

--- Every pattern of every group must match one of the parameters' names.
function Optimizer:check_groups(names)
  local function used(match)
    for _, name in ipairs(names) do if match(name) then return true end end
    return false
  end
  for i, g in ipairs(self.groups) do
    local said = type(g.said) == "table" and g.said or { g.said }
    for _, one in ipairs(said) do
      if not used(matcher(one)) then
        util.fail_at(self.where, "optim.%s: groups[%d]: %s matches no parameter; %s", self.def.name, i,
          type(one) == "string" and ("the pattern %q"):format(one) or "the function", type(one) == "string"
            and util.suggest(one, names) or ("there are " .. table.concat(names, ", ", 1, math.min(#names, 8))))
      end
    end
  end
end

-- The hyperparameters of one parameter.
function Optimizer:hyper(graph, group, dims)
  local h = util.copy(self.h)
  if group > 0 then for k, v in util.sorted(self.groups[group].h) do h[k] = v end end
  if self.no_decay and dims < 2 and h.weight_decay then h.weight_decay = 0 end
  h.lr, h.t = graph:hyper("lr", group), graph:hyper("t", 0)
  local name = self.def.name
  return setmetatable(h, { __index = function(_, key)
    util.fail_at(self.where, "optimizer %s reads h.%s, which has no value; give it to the constructor or in defaults",
      name,
      tostring(key))
  end })
end

--- The new value of the parameter of an entry that graph:compile gives `update`, { name, param, group }, from its gradient. Adds
--- states and their assignments.
function Optimizer:value(graph, entry, grad)
  local def = self.def
  local h = self:hyper(graph, entry.group, #entry.param:shape())
  local list = def.state
  if type(list) == "function" then list = list(h) end
  local symbols, new, known = {}, {}, {}
  for i, name in ipairs(list) do
    local fill = def.fill[name] or 0
    if type(fill) == "string" then fill = h[fill] end
    symbols[name] = graph:state(entry.param, name, fill)
    known[i] = name
  end
  local s = setmetatable({}, {
    __index = function(_, key)
      local v = new[key] or symbols[key]
      if not v then util.fail("optimizer %s has no state '%s'; %s", def.name, tostring(key),
        util.suggest(key, known)) end
      return v
    end,
    __newindex = function(_, key, value)
      if not symbols[key] then
        util.fail("optimizer %s has no state '%s'; %s", def.name, tostring(key), util.suggest(key, known))
      end
      if not core.is_symbolic(value) then
        util.fail("optimizer %s: state '%s' wants a tensor, got %s", def.name, key, util.show(value))
      end
      new[key] = value
    end,
  })
  local value = def.update(entry.param, grad, s, h)
  if not core.is_symbolic(value) then
    util.fail_at(self.where, "optimizer %s: update must return the new parameter, got %s", def.name, util.show(value))
  end
  for _, name in ipairs(list) do
    if new[name] then graph:assign(symbols[name], new[name]) end
  end
  return value
end

return define
