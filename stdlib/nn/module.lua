-- nn.module(name): a class whose instances hold parameters, buffers and other modules in their fields.
--
--   local Block = nn.module("Block")
--   function Block:init(c) self.up = nn.Linear(c, 4 * c) end
--   function Block:forward(x) return dt.gelu(self.up(x)) end
--   local block = Block(384)
--
-- Fields count in the order of their first assignment, lists inside fields by number, other tables by sorted key: paths
-- such as "blocks.0.attn.qkv.weight" (numbers from 0, as in PyTorch's state dicts) are the same in every process.
local core = require "dtrain.core"
local parameter = require "dtrain.nn.parameter"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local Module = {} -- methods that every module has

-- A field of the user's may have a method's name, so the library itself calls M.base.count(model), not model:count().
local M = { base = Module }

function M.is(x)
  local meta = getmetatable(x)
  return type(meta) == "table" and meta.dtrain_module == true
end

-- A table inside of a field that holds parameters: they lie in nests[table], so that reading the table gives their values, as reading
-- a module's field does.
local nests = setmetatable({}, { __mode = "k" })
local nest = {
  __index = function(t, key)
    local p = nests[t][key]
    return p and p:value()
  end,
  __newindex = function(t, key, value)
    if parameter.is(value) then nests[t][key] = value else rawset(t, key, value) end
  end,
  __len = function(t)
    local n = 0
    while rawget(t, n + 1) ~= nil or nests[t][n + 1] do n = n + 1 end
    return n
  end,
  __pairs = function(t)
    local keys = {}
    for key in next, t do keys[#keys + 1] = key end
    for key in next, nests[t] do keys[#keys + 1] = key end
    local i = 0
    return function()
      i = i + 1
      if keys[i] ~= nil then return keys[i], t[keys[i]] end
    end
  end,
}

-- Whether a value is a table that may hold modules and parameters.
local function plain(value)
  return type(value) == "table" and (getmetatable(value) == nil or getmetatable(value) == nest)
end

-- (key, what lies there) in order: parameters themselves, not their values.
local function entries(t)
  local all = {}
  for key, value in next, t do all[key] = value end
  for key, p in next, nests[t] or {} do all[key] = p end
  return util.sorted(all)
end

local function raw_keys(t)
  local all = {}
  for key in next, t do all[key] = true end
  return util.keys(all)
end

local function make_nest(t)
  local params = nests[t] or {}
  for key, value in next, t do
    if parameter.is(value) then params[key] = value end
  end
  if next(params) == nil then return end
  for key in next, params do rawset(t, key, nil) end
  nests[t] = params
  setmetatable(t, nest)
end

local making -- the module whose init runs
local restore = { __close = function(before) making = before[1] end }

-- Modules and parameters know what they were put into, or else what was being made when they were made: the way to the outermost
-- module, which names them.
local function put_into(self, value, seen)
  if M.is(value) then
    rawset(value, "_up", self)
  elseif parameter.is(value) then
    value.up = self
  elseif plain(value) and not seen[value] then
    seen[value] = true
    for _, inner in entries(value) do put_into(self, inner, seen) end
    make_nest(value)
  end
end

local function new_index(self, key, value)
  put_into(self, value, {})
  local keys, params = rawget(self, "_keys"), rawget(self, "_params")
  if not keys.seen[key] then
    keys.seen[key] = true
    if type(value) ~= "number" and type(value) ~= "string" and not M.is(value) then keys.at[key] = util.frame() end
    keys[#keys + 1] = key
  end
  if parameter.is(value) then
    params[key] = value
  else
    params[key] = nil
    rawset(self, key, value)
  end
end

local function call(self, ...)
  local class = getmetatable(self).class
  local forward = class.forward
  if not forward then
    util.fail("%s has no forward; define function %s:forward(x) ... end", class.name, class.name)
  end
  local active, s = util.active, scope.current
  active[#active + 1] = self
  local name = s and s.blocks and s.blocks[self]
  local results = table.pack(scope.in_block(name, forward, self, ...))
  active[#active] = nil
  return table.unpack(results, 1, results.n)
end

--- nn.module(name [, parent]): a new class. `class(...)` makes an instance and runs class:init(...).
function M.module(name, parent)
  util.check("nn.module", name, "string")
  local class = setmetatable({ name = name }, {
    __name = "module class",
    __index = parent or Module,
    __call = function(class, ...)
      local self = setmetatable({ _keys = { seen = {}, at = {} }, _params = {}, _up = making, where = util.frame() }, class.meta)
      if class.init then
        local _ <close> = setmetatable({ making }, restore)
        making = self
        class.init(self, ...)
      end
      return self
    end,
    __tostring = function() return "module class " .. name end,
  })
  class.meta = {
    __name = "module",
    dtrain_module = true,
    class = class,
    __newindex = new_index,
    __call = call,
    __tostring = function(self) return require "dtrain.nn.show"(self) end,
    __index = function(self, key)
      local p = rawget(self, "_params")[key]
      if p then return p:value() end
      return class[key]
    end,
  }
  return class
end

local function part(path, key)
  if math.type(key) == "integer" then key = ("%d"):format(key - 1) end
  return path == "" and tostring(key) or path .. "." .. tostring(key)
end

-- A table without a metatable holds modules and parameters by number, then by sorted key.
local function visit_table(t, path, f, seen)
  if seen[t] then return end
  seen[t] = true
  for key, value in entries(t) do
    if M.is(value) then
      f(part(path, key), value)
    elseif parameter.is(value) then
      f(part(path, key), value)
    elseif plain(value) then
      visit_table(value, part(path, key), f, seen)
    end
  end
end

--- Calls f(name, child) for each direct child (module or parameter) in order; names of list entries hold the list's.
function Module:each_child(f)
  for _, key in ipairs(rawget(self, "_keys")) do
    local p, value = rawget(self, "_params")[key], rawget(self, key)
    if p then
      f(part("", key), p)
    elseif M.is(value) then
      f(part("", key), value)
    elseif plain(value) then
      visit_table(value, part("", key), f, {})
    end
  end
end

--- Calls f(path, parameter) for every parameter and buffer in order, each once: a shared one under its first path.
function Module:each_parameter(f)
  local seen = {}
  local function walk(module, path)
    if seen[module] then return end
    seen[module] = true
    Module.each_child(module, function(name, child)
      local full = part(path, name)
      if M.is(child) then
        walk(child, full)
      elseif not seen[child] then
        seen[child] = true
        f(full, child)
      end
    end)
  end
  walk(self, "")
end

--- Concrete tensors in fields of a module or of its lists, which a trace takes for constants: list of { name = path, where = the line
--- that put it there }.
function M.constants(module)
  local out, seen = {}, {}
  local function walk(value, path, where)
    if core.is_tensor(value) then
      out[#out + 1] = { name = path, where = where }
    elseif M.is(value) and not seen[value] then
      seen[value] = true
      for _, key in ipairs(rawget(value, "_keys")) do
        walk(rawget(value, key), part(path, key), rawget(value, "_keys").at[key] or value.where)
      end
    elseif type(value) == "table" and getmetatable(value) == nil and not seen[value] then
      seen[value] = true
      for key, inner in util.sorted(value) do walk(inner, part(path, key), where) end
    end
  end
  walk(module, "")
  return out
end

--- The blocks of a model: every entry of a list of modules is one, named by its path ("blocks.3"); what is inside of an
--- entry belongs to it. Returns module -> name, and for modules that are lists themselves (Sequential) what their entries'
--- names begin with.
function Module:blocks()
  local names, lists, seen = {}, {}, {}
  local function entry(value, name)
    if M.is(value) then
      names[value] = names[value] or name
    elseif plain(value) then
      for _, inner in entries(value) do entry(inner, name) end
    end
  end
  local function walk(value, path)
    if seen[value] then return end
    seen[value] = true
    for _, key in ipairs(M.is(value) and rawget(value, "_keys") or raw_keys(value)) do
      local child = rawget(value, key)
      if type(key) == "number" then
        lists[value] = path == "" and "" or path .. "."
        entry(child, part(path, key))
      elseif M.is(child) or plain(child) then
        walk(child, part(path, key))
      end
    end
  end
  walk(self, "")
  return names, lists
end

--- The path of a parameter from the outermost module that this one belongs to, or nil.
function M.name_of(self, p)
  local found
  local up = rawget(self, "_up")
  if up then found = M.name_of(up, p) end
  if not found then
    Module.each_parameter(self, function(name, q) if q == p then found = name end end)
  end
  return found
end

--- for name, tensor in model:named_parameters() do ... end: concrete values in order, buffers too.
function Module:named_parameters()
  local list, i = {}, 0
  Module.each_parameter(self, function(name, p) list[#list + 1] = { name, p } end)
  return function()
    i = i + 1
    if list[i] then return list[i][1], list[i][2]:concrete() end
  end
end

--- Number of trainable elements, shared ones once.
function Module:count()
  local n = 0
  Module.each_parameter(self, function(_, p) if p.trainable then n = n + p:numel() end end)
  return n
end

--- name -> concrete tensor of every parameter and buffer (iterate with dt.sorted).
function Module:state()
  local out = {}
  Module.each_parameter(self, function(name, p) out[name] = p:concrete() end)
  return out
end

--- Takes values by name, all of them: an unknown or a missing name is an error that names it.
function Module:load(tensors)
  local known, all = {}, {}
  Module.each_parameter(self, function(name, p)
    known[name] = p
    all[#all + 1] = name
  end)
  for name in util.sorted(tensors) do
    if not known[name] then util.fail("the model has no parameter '%s'; %s", name, util.suggest(name, all)) end
  end
  for _, name in ipairs(all) do
    if tensors[name] == nil then util.fail("no value for the parameter '%s' among the given tensors", name) end
    known[name]:set(tensors[name], name)
  end
  return self
end

--- On concrete tensors: dropout drops and batch norm uses the batch's statistics after train(), not after eval() (the
--- start). A job's graphs know by themselves which they are.
function Module:train() scope.training = true return self end
function Module:eval() scope.training = false return self end

--- Freezes every parameter inside (or thaws with true): no gradient, no update, in engines made from now on.
function Module:requires_grad(flag)
  Module.each_parameter(self, function(name, p)
    if p.engine and p.trainable ~= (flag and p.type == "param") then
      util.fail("requires_grad(%s): an engine holds the parameter '%s', and what an engine trains is fixed when it is made; call it "
        .. "before dt.engine, or give dt.job { freeze = module } to a second job", tostring(flag), name)
    end
  end)
  Module.each_parameter(self, function(_, p) p.trainable = flag and p.type == "param" end)
  return self
end

--- nn.assign(module, "running_mean", value): new value of a buffer, at once or as part of the traced step.
function M.assign(self, key, value)
  local p = rawget(self, "_params")[key]
  if not p or p.type ~= "buffer" then util.fail("nn.assign: the module has no buffer '%s'", tostring(key)) end
  if scope.current then scope.current.graph:assign(p:value(), value) else p:set(value, key) end
end

parameter.path = M.name_of

return M
