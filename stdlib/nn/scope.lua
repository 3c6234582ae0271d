-- What a module's forward needs to know about where it runs: the graph being traced (none: on concrete tensors),
-- whether it trains, and the numbers that key dropout. One scope is current at a time; trace.lua and grad.lua enter
-- and leave it.
local core = require "dtrain.core"
local util = require "dtrain.util"

core.position(function() return util.beyond() end) -- positions of the core's errors when no user's frame is there

local scope = {
  -- { graph, rows = of the microbatch, symbols = { [parameter] = symbol }, training, dropouts, ignored, label, once = it is traced
  -- once for all steps, concrete = on concrete values }
  current = nil,
  training = false,  -- on concrete tensors: what model:train() and model:eval() set
  seed = nil,        -- of concrete initial values (dt.manual_seed); nil: --seed, else 0
  redrawn = nil,     -- a parameter of which a value was read that is not the one a job then began with
  made = 0,          -- parameters made so far: each gets its own stream
}

-- A job's forward runs once: what math.random gives there would be the same number in every step.
local random = math.random
function math.random(...) -- luacheck: ignore
  if scope.current and scope.current.once then
    util.fail("math.random() in a forward, which runs once: every step would see this one number; draw it before the job if "
      .. "that is meant, else use operations that draw in each step (dt.rand, dt.randn, nn.Dropout)")
  end
  return random(...)
end

--- Runs f(...) with `s` as the current scope and returns its results; the old scope comes back also after an error,
--- whose message gets a position when it has none.
function scope.with(s, f, ...)
  local old, depth = scope.current, #util.active
  scope.current = s
  local function handler(e)
    if type(e) ~= "string" or e:find("^[^\n]-:%d+: ") then return e end
    local where = util.where()
    return where and (where .. ": " .. e) or e
  end
  local results = table.pack(xpcall(f, handler, ...))
  scope.current = old
  for i = #util.active, depth + 1, -1 do util.active[i] = nil end
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

--- f(...), whose operations belong to the block of this name, unless they are in a block already.
function scope.in_block(name, f, ...)
  local s = scope.current
  if not name or not s or s.block then return f(...) end
  s.block = name
  s.graph:block(name)
  local results = table.pack(f(...))
  s.block = nil
  s.graph:block()
  return table.unpack(results, 1, results.n)
end

--- Whether dropout drops and batch norm uses the batch's own statistics.
function scope.is_training()
  if scope.current then return scope.current.training end
  return scope.training
end

--- What a loss of this trace ignores: a label that counts for nothing.
function scope.ignore(index)
  local s = scope.current
  if not s then return end
  s.ignored = s.ignored or {}
  if not util.contains(s.ignored, index) then s.ignored[#s.ignored + 1] = index end
end

--- The labels that the losses traced so far ignore, or nil.
function scope.ignored() return scope.current and scope.current.ignored end

--- A number for a dropout layer: its place in the trace, so that it is the same on every rank and for every batch size.
function scope.next_dropout()
  local s = scope.current
  if not s then return 0 end
  s.dropouts = (s.dropouts or 0) + 1
  return s.dropouts
end

return scope
