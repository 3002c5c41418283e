_cubroker_completion() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    local head=$word option='' type value

    [[ $2 == [=:] ]] || head=${word%"$2"}
    [[ $word == -*=* ]] && option=${word%%=*}=
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                value=$option$value
                COMPREPLY+=("${value#"$head"}")
                [[ $value == *= ]] && compopt -o nospace
                ;;
        esac
    done <<< "$(env COMP_LINE="$line" _CUBROKER_COMPLETE=bash_complete "$1")"

    return 0
}

_cubroker_completion_setup() {
    complete -o nosort -F _cubroker_completion cubroker
}

_cubroker_completion_setup;
